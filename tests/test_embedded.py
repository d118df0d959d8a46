"""The embedded nats-server: starts, is found, survives a restart, dies with its parent."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from kvbus.embedded import BINARY_ENV, EmbeddedNats, find_binary
from kvbus.errors import BusError

pytestmark = pytest.mark.nats


def takes_connections(server: EmbeddedNats) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", server.port), timeout=1) as sock:
            return sock.recv(5) == b"INFO "
    except OSError:
        return False


def test_it_takes_connections_when_started_and_leaves_nothing_when_stopped() -> None:
    server = EmbeddedNats()
    with server:
        pid, store = server.pid, server.log_file.parent
        assert takes_connections(server)
        assert store.is_dir()
    assert not psutil.pid_exists(pid)
    assert not store.exists()
    assert not takes_connections(server)


def test_two_servers_do_not_meet() -> None:
    with EmbeddedNats() as one, EmbeddedNats() as two:
        assert one.port != two.port
        assert one.url != two.url


def test_a_restart_keeps_url_and_store(tmp_path: Path) -> None:
    with EmbeddedNats(store_dir=tmp_path / "store") as server:
        url, pid = server.url, server.pid
        server.restart()
        assert server.url == url
        assert server.pid != pid
        assert takes_connections(server)
    assert (tmp_path / "store" / "jetstream").is_dir(), "a given store is the user's to remove"


def test_a_taken_port_is_an_error_that_shows_the_log() -> None:
    with EmbeddedNats() as server, pytest.raises(BusError, match="address already in use"):
        EmbeddedNats(port=server.port).start()


def test_a_broken_configuration_is_an_error_that_shows_why(tmp_path: Path) -> None:
    config = tmp_path / "broken.conf"
    config.write_text("max_payload: soon\n")
    with pytest.raises(BusError, match="did not start"):
        EmbeddedNats(config_file=config).start()


def test_the_given_binary_must_be_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BINARY_ENV, "/no/such/nats-server")
    with pytest.raises(BusError, match=BINARY_ENV):
        find_binary()
    monkeypatch.delenv(BINARY_ENV)
    assert os.access(find_binary(), os.X_OK)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux ends children with their parent")
def test_it_dies_with_the_process_that_started_it() -> None:
    script = (
        "import os, time; from kvbus.embedded import EmbeddedNats\n"
        "server = EmbeddedNats().start(); print(server.pid, server.log_file.parent, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid, store = parent.stdout.readline().split()
        parent.kill()
    deadline_s = time.monotonic() + 5
    while psutil.pid_exists(int(pid)) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert not psutil.pid_exists(int(pid))
    subprocess.run(["rm", "-r", store], check=True)

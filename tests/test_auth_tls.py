"""TLS as its user sets it up: certificates by openssl, `kvbus auth init --tls-...`, every process with its NAME.env."""

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.light_world import ask

from kvbus.bus import Bus, BusSettings
from kvbus.embedded import EmbeddedNats
from kvbus.errors import BusError
from kvbus.local.children import Child, kvbus_command
from kvbus.local.ports import free_port
from kvbus_schemas import AnyMessage, PushDone, subjects

pytestmark = [
    pytest.mark.nats,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates"),
]
READY_MAX_S = 60.0


def openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


def certificates(directory: Path) -> None:
    """ca.pem, and server.pem with server.key that it has signed, for 127.0.0.1; client.pem likewise."""
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    ca, key = str(directory / "ca.pem"), str(directory / "ca.key")
    openssl("req", "-x509", *curve, "-keyout", key, "-out", ca, "-subj", "/CN=our-ca")
    for name in ("server", "client"):
        cert, key_of = str(directory / f"{name}.pem"), str(directory / f"{name}.key")
        signed = ["-CA", ca, "-CAkey", key, "-addext", "subjectAltName=IP:127.0.0.1"]
        openssl("req", "-x509", *curve, *signed, "-keyout", key_of, "-out", cert, "-subj", f"/CN={name}")


def kvbus(*arguments: str, **environ: str) -> str:
    command = [sys.executable, "-m", "kvbus", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environ, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def environ_of(auth: Path, name: str) -> dict[str, str]:
    lines = (auth / f"{name}.env").read_text().splitlines()
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


@contextlib.asynccontextmanager
async def processes(auth: Path, nats: str, logs: Path) -> AsyncIterator[str]:
    """All of kvbus, each with its own environment; where the router listens."""
    port = free_port()
    commands = {
        "matcher-0": ["matcher"],
        "reuse-0": ["reuse"],
        "p0": ["sim-engine", "prefill", "tiny", "--engine-id", "p0", "--port", str(free_port())],
        "d0": ["sim-engine", "decode", "tiny", "--engine-id", "d0", "--port", str(free_port())],
        "router-0": ["router", "--port", str(port)],
    }
    children = [
        Child(name, kvbus_command(*command, "--nats", nats), logs, os.environ | environ_of(auth, name))
        for name, command in commands.items()
    ]
    try:
        await _until_healthy(f"http://127.0.0.1:{port}", children)
        yield f"http://127.0.0.1:{port}"
    finally:
        await asyncio.gather(*(child.stop() for child in children))


async def _until_healthy(url: str, children: list[Child]) -> None:
    async with asyncio.timeout(READY_MAX_S), aiohttp.ClientSession() as http:
        while True:
            for child in children:
                child.check()
            with contextlib.suppress(aiohttp.ClientError):
                async with http.get(url + "/health") as response:
                    engines = (await response.json())["engines"]
                    if response.status == 200 and engines["prefill"] and engines["decode"]:
                        return
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("both_ways", [False, True], ids=["the server shows a certificate", "both sides do"])
async def test_a_request_is_served_over_tls_and_nobody_comes_in_without(tmp_path: Path, both_ways: bool) -> None:
    certificates(tmp_path)
    auth, ca = tmp_path / "auth", str(tmp_path / "ca.pem")
    tls = ["--tls-cert", str(tmp_path / "server.pem"), "--tls-key", str(tmp_path / "server.key"), "--tls-ca", ca]
    if both_ways:
        tls += ["--tls-client-ca", ca, "--tls-client-cert", str(tmp_path / "client.pem")]
        tls += ["--tls-client-key", str(tmp_path / "client.key")]
    kvbus("auth", "init", str(auth), "--engine", "prefill:p0", "--engine", "decode:d0", *tls)
    with EmbeddedNats(config_file=auth / "nats-auth.conf") as server:
        kvbus("auth", "provision", "--dir", str(auth), "--nats", server.url, **environ_of(auth, "operator"))
        async with processes(auth, server.url, tmp_path / "logs") as url, aiohttp.ClientSession() as http:
            heard: list[AnyMessage] = []
            observer = await Bus.connect(_settings(auth, "observer", server), name="observer", incarnation="1")
            await observer.subscribe(subjects.of_kind(PushDone), heard.append)
            answer = await ask(http, url, {"prompt": "a question of some length " * 20})
            assert answer.headers["x-kvbus-mode"] == "early"
            async with asyncio.timeout(10):
                while not heard:  # noqa: ASYNC110  (what is awaited is another process's doing)
                    await asyncio.sleep(0.05)
            await observer.close()
        await _stays_outside(auth, server, tmp_path, both_ways=both_ways)
    for log in (tmp_path / "logs").glob("*.log"):
        assert "bus_denied" not in log.read_text(), log


def _settings(auth: Path, name: str, server: EmbeddedNats, **changes: str) -> BusSettings:
    found = environ_of(auth, name)
    given: Any = {key.removeprefix("KVBUS_").lower(): value for key, value in found.items() if key != "KVBUS_NAME"}
    return BusSettings(nats=server.url, connect_timeout_s=2.0, **(given | changes))


async def _stays_outside(auth: Path, server: EmbeddedNats, directory: Path, *, both_ways: bool) -> None:
    """Whoever trusts another authority, and, where both sides show one, whoever has no certificate."""
    (directory / "other").mkdir()
    certificates(directory / "other")
    outside = [{"tls_ca": str(directory / "other" / "ca.pem")}]
    if both_ways:
        outside.append({"tls_cert": "", "tls_key": ""})
    for changes in outside:
        with pytest.raises(BusError):
            await Bus.connect(_settings(auth, "observer", server, **changes), name="observer", incarnation="1")

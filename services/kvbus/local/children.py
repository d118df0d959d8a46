"""One child process: its command, its log file, its end. Dies with the process that started it."""

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from kvbus.errors import CommandFailed

STOP_S = 20.0
"""How long a child may take to end after SIGTERM, before it and its own children are killed."""
LOG_TAIL_LINES = 15
_PR_SET_PDEATHSIG = 1


class Child:
    """A running child. `name` is for people; the log is `log_dir/name.log`."""

    def __init__(self, name: str, command: list[str], log_dir: Path, environ: Mapping[str, str] | None = None) -> None:
        self.name, self.command = name, command
        self.log_file = log_dir / f"{name}.log"
        self._environ = dict(os.environ if environ is None else environ)
        log_dir.mkdir(parents=True, exist_ok=True)
        self.log_file.unlink(missing_ok=True)
        self._process = self._spawn()

    def _spawn(self) -> "subprocess.Popen[bytes]":
        with self.log_file.open("ab") as log:
            return subprocess.Popen(  # noqa: S603  (our own commands)
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environ,
                preexec_fn=_die_with_parent,  # noqa: PLW1509  (nothing here holds a lock)
                start_new_session=True,
            )

    def start_again(self) -> None:
        """A new process in the place of one that has ended; its log follows that of the old one."""
        assert self.exit_code is not None, f"{self.name} still runs"
        self._process = self._spawn()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def check(self) -> None:
        """Raise CommandFailed, with the end of the log, if the child has ended."""
        if self.exit_code is not None:
            raise CommandFailed(
                f"{self.name} ended with code {self.exit_code}; the end of {self.log_file}:\n{self.log_tail()}"
            )

    def log_tail(self) -> str:
        """The last lines of the log, without ASCII art."""
        lines = self.log_file.read_text(errors="replace").splitlines()
        return "\n".join(f"    {line[:300]}" for line in lines[-LOG_TAIL_LINES:])

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the child, if it runs."""
        if self.exit_code is None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """End the child and all that it started, at once."""
        self._kill_session()
        self._process.wait()

    async def stop(self, timeout_s: float = STOP_S) -> None:
        """SIGTERM, wait, then kill what is left of its session."""
        self.send(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.to_thread(self._process.wait), timeout_s)
        self._kill_session()
        await asyncio.to_thread(self._process.wait)

    def members(self) -> list[int]:
        """Process ids of the child and of all that it started."""
        return _session(self._process.pid)

    def send_all(self, number: signal.Signals) -> None:
        """Send a signal to the child and to all that it started."""
        for pid in self.members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _kill_session(self) -> None:
        self.send_all(signal.SIGKILL)


def _session(leader: int) -> list[int]:
    """Every process of the session that `leader` leads; vLLM starts groups of its own inside it."""
    members = [leader]
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ProcessLookupError):
            if os.getsid(int(entry.name)) == leader:
                members.append(int(entry.name))
    return members


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def kvbus_command(*arguments: str) -> list[str]:
    """The kvbus command of this Python's environment."""
    return [sys.executable, "-m", "kvbus", *arguments]

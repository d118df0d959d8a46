"""The processes of a fleet by name: end them, stop them for a while, start them again, notice who ended by itself."""

import asyncio
import signal
import subprocess
import time

from kvbus.chaos.score import Crash
from kvbus.local.children import Child
from kvbus.local.fleet import Fleet

LOOK_EVERY_S = 0.25
NATS = "nats"
LOG_LINES = 40
WAKE_LATE_S = 3.0


class Parts:
    """`down` are those that we have ended ourselves; whoever else ends has crashed, and is started again."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.down: set[str] = set()
        self.crashes: list[Crash] = []

    def child(self, name: str) -> Child:
        return next(child for child in self.fleet.children() if child.name == name)

    async def kill(self, name: str, down_s: float) -> None:
        """SIGKILL to it and all that it started; after `down_s` it is started again."""
        self.down.add(name)
        if name == NATS:
            assert self.fleet.nats is not None
            await asyncio.to_thread(self.fleet.nats.restart, down_s=down_s)
        else:
            child = self.child(name)
            await asyncio.to_thread(child.kill)
            await asyncio.sleep(down_s)
            child.start_again()
        self.down.discard(name)

    async def pause(self, name: str, hold_s: float) -> None:
        """SIGSTOP to it and all that it started, and SIGCONT after `hold_s`."""
        waker = self._waker(name, hold_s + WAKE_LATE_S)
        self._send(name, signal.SIGSTOP)
        try:
            await asyncio.sleep(hold_s)
        finally:
            self._send(name, signal.SIGCONT)
            waker.kill()
            waker.wait()

    async def watch(self) -> None:
        """Until cancelled."""
        while True:
            for child in self.fleet.children():
                if child.name not in self.down and child.exit_code is not None:
                    self.crashes.append(Crash(child.name, time.monotonic(), child.exit_code, _tail(child)))
                    child.start_again()
            nats = self.fleet.nats
            if nats is not None and NATS not in self.down and not nats.running:
                self.crashes.append(Crash(NATS, time.monotonic(), -1, ""))
                await asyncio.to_thread(nats.start)
            await asyncio.sleep(LOOK_EVERY_S)

    def _waker(self, name: str, after_s: float) -> "subprocess.Popen[bytes]":
        """Somebody who continues it even if we are killed meanwhile: what is stopped hears no other signal."""
        assert self.fleet.nats is not None
        pids = [self.fleet.nats.pid] if name == NATS else self.child(name).members()
        script = f"sleep {after_s}; kill -CONT {' '.join(map(str, pids))}"
        return subprocess.Popen(["/bin/sh", "-c", script], start_new_session=True)  # noqa: S603  (numbers of our own)

    def _send(self, name: str, number: signal.Signals) -> None:
        if name == NATS:
            assert self.fleet.nats is not None
            self.fleet.nats.send(number)
        else:
            self.child(name).send_all(number)


def _tail(child: Child) -> str:
    return "\n".join(child.log_file.read_text(errors="replace").splitlines()[-LOG_LINES:])

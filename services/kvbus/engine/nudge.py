"""A rank's call to its own scheduler: look now, there is something to report.

Scheduler and ranks are processes of their own, and between two steps nothing of vLLM's goes from a rank to the
scheduler. So an engine that only waits would learn by its next look, or by a notice on the bus, what its rank has
known for milliseconds. A datagram on a Unix socket wakes it. It carries nothing and proves nothing: lost, forged or
on a system without abstract sockets, the next look finds the same.
"""

import contextlib
import socket
import threading
from collections.abc import Callable

NAME_MAX = 100
"""Characters of a name, from its end, that an address has room for."""


class Ear:
    """The scheduler's side: calls `heard`, on a thread of its own, whenever a rank calls."""

    def __init__(self, name: str, heard: Callable[[], None]) -> None:
        self._heard = heard
        self._socket = _bound(name)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvbus-ear", daemon=True)
        if self._socket is not None:
            self._thread.start()

    def close(self) -> None:
        """Hear nothing more."""
        self._closed = True
        if self._socket is not None:
            self._socket.shutdown(socket.SHUT_RDWR)
            self._thread.join()
            self._socket.close()

    def _run(self) -> None:
        assert self._socket is not None
        while True:
            self._socket.recv(1)
            if self._closed:
                return
            self._heard()


class Nudge:
    """A rank's side: `nudge()` never blocks and never fails."""

    def __init__(self, name: str) -> None:
        self._address = _address(name)
        self._socket = _datagram()

    def __call__(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.sendto(b"!", self._address)

    def close(self) -> None:
        """Nudge nobody any more."""
        if self._socket is not None:
            self._socket.close()


def _address(name: str) -> str:
    return f"\0kvbus.{name[-NAME_MAX:]}"


def _datagram() -> socket.socket | None:
    if not hasattr(socket, "AF_UNIX"):
        return None
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    made.setblocking(False)
    return made


def _bound(name: str) -> socket.socket | None:
    made = _datagram()
    if made is None:
        return None
    try:
        made.bind(_address(name))
    except OSError:
        made.close()
        return None
    made.setblocking(True)
    return made

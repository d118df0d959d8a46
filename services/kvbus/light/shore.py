"""The consumer's end of the data plane: a TCP server that stores what is written, and keeps the landing notes.

Like NIXL it asks nobody whether a WRITE is wanted: that no block is written which is not held for it is for the cores
to ensure. A note can be read only after its blocks are in place. A connection is closed only when nothing that was
received on it will be stored any more.
"""

import contextlib
import queue
import socket
import threading

import structlog

from kvbus.light.frames import Blocks, Hello, Stored, Welcome, receive, send
from kvbus.light.memory import KvMemory

log = structlog.get_logger()


class Shore:
    """Takes WRITEs for `incarnation` into `memory`, on a port of its own at `host`."""

    def __init__(self, memory: KvMemory, incarnation: str, host: str) -> None:
        self.memory, self.incarnation = memory, incarnation
        self._notes: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._server = socket.create_server((host, 0))
        self._open: set[socket.socket] = set()
        self.port: int = self._server.getsockname()[1]
        threading.Thread(target=self._accept, name="light-shore", daemon=True).start()

    def notes(self) -> list[bytes]:
        """The landing notes that came since the last call."""
        found = []
        while not self._notes.empty():
            found.append(self._notes.get())
        return found

    def close(self) -> None:
        """Take nothing more."""
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for sock in list(self._open):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._server.accept()
            except OSError:
                return
            self._open.add(sock)
            threading.Thread(target=self._serve, args=(sock,), name="light-landing", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._welcomed(sock):
                self._take_all(sock)
        except (OSError, ValueError) as error:
            log.info("landing_ended", error=repr(error))
        finally:
            self._open.discard(sock)
            sock.close()

    def _welcomed(self, sock: socket.socket) -> bool:
        hello = receive(sock)
        if not isinstance(hello, Hello):
            return False
        error = ""
        if hello.consumer_incarnation != self.incarnation:
            error = f"incarnation {hello.consumer_incarnation} is gone, this is {self.incarnation}"
        send(sock, Welcome(error))
        return not error

    def _take_all(self, sock: socket.socket) -> None:
        while isinstance(frame := receive(sock), Blocks):
            error = self._store(frame)
            if not error:
                self._notes.put(frame.note)
            send(sock, Stored(frame.handle, error))

    def _store(self, frame: Blocks) -> str:
        size = self.memory.block_bytes
        if len(frame.content) != size * len(frame.block_ids):
            return f"{len(frame.content)} bytes for {len(frame.block_ids)} blocks of {size}"
        if not all(0 <= block < self.memory.blocks for block in frame.block_ids):
            return "a block that is not here"
        for number, block in enumerate(frame.block_ids):
            self.memory.put(block, frame.content[number * size : (number + 1) * size])
        return ""

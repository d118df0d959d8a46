"""The light data plane behind `rank.DataPlane`: copies blocks to other light engines over TCP.

A WRITE reads its source blocks when it goes out, not when it is submitted, as a network card does: a source that is
reused too early shows in the answer. An unsent WRITE can be aborted; one that was sent is over when it is acknowledged
or when the *peer* has closed the connection, since until then it may still be stored.
"""

import contextlib
import itertools
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog

from kvbus.engine.facts import landing_note
from kvbus.engine.writing import Write
from kvbus.errors import EngineError
from kvbus.light.frames import Address, Blocks, Hello, Stored, Welcome, receive, send
from kvbus.light.memory import KvMemory
from kvbus.light.shore import Shore
from kvbus_schemas import EngineCard

log = structlog.get_logger()

RANK = 0
CONNECT_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class _Cargo:
    handle: int
    write: Write
    note: bytes


class _Line:
    """The connection to one consumer."""

    def __init__(self, sock: socket.socket, memory: KvMemory, block_s: float) -> None:
        self._sock, self._memory, self._block_s = sock, memory, block_s
        self._outbox: queue.SimpleQueue[_Cargo | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._unsent: set[int] = set()
        self._sent: set[int] = set()
        self._failed: set[int] = set()
        self.closed = False
        for work, name in ((self._send_all, "light-writer"), (self._read_all, "light-acks")):
            threading.Thread(target=work, name=name, daemon=True).start()

    def submit(self, cargo: _Cargo) -> None:
        """Send it soon. Raises EngineError when the connection is gone."""
        with self._lock:
            if self.closed:
                raise EngineError(f"the connection to {cargo.write.consumer_id} is closed")
            self._unsent.add(cargo.handle)
        self._outbox.put(cargo)

    def state(self, handle: int) -> str:
        """`pending`, `done` or `failed`; a failure is told once."""
        with self._lock:
            if handle in self._unsent or handle in self._sent:
                return "pending"
            failed = handle in self._failed
            self._failed.discard(handle)
            return "failed" if failed else "done"

    def abort(self, handle: int) -> bool:
        """Whether nothing of it will be stored from now on."""
        with self._lock:
            self._unsent.discard(handle)
            return handle not in self._sent

    def end(self) -> None:
        """Send nothing more; what was sent is still acknowledged."""
        self._outbox.put(None)

    def _send_all(self) -> None:
        try:
            while (cargo := self._outbox.get()) is not None:
                self._send(cargo)
            if not self.closed:
                self._sock.shutdown(socket.SHUT_WR)
        except OSError as error:
            log.info("line_broken", error=repr(error))

    def _send(self, cargo: _Cargo) -> None:
        write = cargo.write
        if self._block_s:
            time.sleep(self._block_s * len(write.source_blocks))
        with self._lock:
            if cargo.handle not in self._unsent:
                return
            self._unsent.discard(cargo.handle)
            self._sent.add(cargo.handle)
        content = b"".join(map(self._memory.get, write.source_blocks))
        send(self._sock, Blocks(cargo.handle, list(write.target_blocks), content, cargo.note))

    def _read_all(self) -> None:
        try:
            while isinstance(frame := receive(self._sock), Stored):
                self._acknowledged(frame)
        except (OSError, ValueError) as error:
            log.info("line_ended", error=repr(error))
        finally:
            self._close()

    def _acknowledged(self, stored: Stored) -> None:
        if stored.error:
            log.error("write_refused", error=stored.error)
        with self._lock:
            self._sent.discard(stored.handle)
            if stored.error:
                self._failed.add(stored.handle)

    def _close(self) -> None:
        with self._lock:
            self.closed = True
            self._failed |= self._unsent | self._sent
            self._unsent.clear()
            self._sent.clear()
        self._outbox.put(None)
        self._sock.close()


class TcpDataPlane:
    """Implements `rank.DataPlane` for the one rank of a light engine. `block_s`: what a block takes on the wire."""

    def __init__(self, me: str, memory: KvMemory, shore: Shore, compat_hash: str, *, block_s: float = 0.0) -> None:
        self.me, self.memory, self.shore, self.compat_hash = me, memory, shore, compat_hash
        self._block_s = block_s
        self._lines: dict[tuple[str, str], _Line] = {}
        self._line_of: dict[int, _Line] = {}
        self._handles = itertools.count(1)

    def connect(self, card: EngineCard, done: Callable[[str], None]) -> None:
        """Shake hands, in the background; `done` gets an error text, or "" when it worked."""
        threading.Thread(target=self._connect, args=(card, done), name="light-handshake", daemon=True).start()

    def connected(self, engine_id: str, incarnation: str) -> bool:
        line = self._lines.get((engine_id, incarnation))
        return line is not None and not line.closed

    def disconnect(self, engine_id: str, incarnation: str) -> None:
        line = self._lines.pop((engine_id, incarnation), None)
        if line is not None:
            line.end()

    def submit(self, write: Write, ready: Any) -> list[int]:
        """Post the WRITE; returns its handle."""
        line = self._lines[(write.consumer_id, write.consumer_incarnation)]
        note = landing_note(write.transfer_id, RANK, write.first, len(write.source_blocks)).encode()
        cargo = _Cargo(next(self._handles), write, note)
        line.submit(cargo)
        self._line_of[cargo.handle] = line
        return [cargo.handle]

    def poll(self, handles: list[int]) -> str:
        """`pending`, `done` or `failed`; drops finished handles from the list."""
        failed = False
        for handle in list(handles):
            state = self._line_of[handle].state(handle)
            if state != "pending":
                failed |= state == "failed"
                handles.remove(handle)
                del self._line_of[handle]
        if handles:
            return "pending"
        return "failed" if failed else "done"

    def abort(self, handles: list[int]) -> bool:
        """Stop a WRITE for good; False when that cannot be done yet."""
        for handle in list(handles):
            if not self._line_of[handle].abort(handle):
                return False
            handles.remove(handle)
            del self._line_of[handle]
        return True

    def notes(self) -> list[bytes]:
        return self.shore.notes()

    def close(self) -> None:
        """End every connection."""
        for key in list(self._lines):
            self.disconnect(*key)
        self.shore.close()

    def _connect(self, card: EngineCard, done: Callable[[str], None]) -> None:
        try:
            self._refuse_unlike(card)
            sock = self._shake_hands(card)
        except (OSError, ValueError, EngineError, msgspec.MsgspecError) as error:
            done(str(error) or repr(error))
            return
        self._lines[(card.engine_id, card.incarnation)] = _Line(sock, self.memory, self._block_s)
        done("")

    def _refuse_unlike(self, card: EngineCard) -> None:
        if card.block_size != self.memory.block_size:
            raise EngineError(
                f"block size {card.block_size} there, {self.memory.block_size} here: start both with the same"
            )
        if card.compat_hash != self.compat_hash:
            raise EngineError(
                f"{card.engine_id} has KV layout {card.compat_hash[:12]}, this engine has {self.compat_hash[:12]}: "
                "both must be light engines of the same version and model"
            )

    def _shake_hands(self, card: EngineCard) -> socket.socket:
        payload = card.agent_metadata.get(f"0.{RANK}")
        if payload is None:
            raise EngineError(f"the card of {card.engine_id} has no address for rank {RANK}")
        address = msgspec.msgpack.decode(payload, type=Address)
        sock = socket.create_connection((address.host, address.port), timeout=CONNECT_TIMEOUT_S)
        with contextlib.ExitStack() as failing:
            failing.callback(sock.close)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            send(sock, Hello(self.me, card.incarnation))
            welcome = receive(sock)
            if not isinstance(welcome, Welcome) or welcome.error:
                raise EngineError(welcome.error if isinstance(welcome, Welcome) else f"{card.engine_id} hung up")
            sock.settimeout(None)
            failing.pop_all()
        return sock

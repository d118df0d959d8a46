"""One rank's thread: it alone talks to NIXL. Posts WRITEs, polls their handles, reads landing notes.

The thread sleeps on its inbox. It polls only while something is open: handles of WRITEs every few hundred
microseconds, landing notes a little slower until the bus has hinted that they must be there.
"""

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import structlog

from kvbus.engine.acquaintance import Acquaintance
from kvbus.engine.facts import SERVED, StepOrders, read_landing_note
from kvbus.engine.landing import LandingCore
from kvbus.engine.link import Link
from kvbus.engine.peers import PRESENCE_LEASE_S, WRITE_MAX_S
from kvbus.engine.plane import DataPlane, state_of
from kvbus.engine.writing import Moves, Write, WritingCore
from kvbus_schemas import EngineCard, Message, PushDone

log = structlog.get_logger()

POLL_WRITES_S = 200e-6
POLL_NOTES_S = 5e-3
"""Without a hint. PushDone hints, and comes at about the same time as a note."""
POLL_HINTED_S = 200e-6
HINT_S = 0.05
"""How long after a hint the notes are polled fast."""
HINT_WAIT_S = 0.005
"""How long a step waits for data that is due any moment."""
PREEMPT_WAIT_S = WRITE_MAX_S + 1.0
PRESENCE_MARGIN_S = 1.5
"""A rank stops writing this long before its engine's presence lease ends."""


class RankSide:
    """One rank: the thread, and what the engine's thread asks of it."""

    def __init__(self, plane: DataPlane, writing: WritingCore, landing: LandingCore, link: Link) -> None:
        self.plane, self.writing, self.landing, self.link = plane, writing, landing, link
        self._inbox: queue.SimpleQueue[Callable[[], Moves | None] | None] = queue.SimpleQueue()
        self._open: dict[str, tuple[Write, list[int]]] = {}
        self.acquaintance = Acquaintance(plane, lambda card, error: self._inbox.put(lambda: self._met(card, error)))
        self._ready: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._sent: set[str] = set()
        self._quiet: Counter[str] = Counter()
        self._hinted_until_s = 0.0
        self._waiting_for: dict[str, Write] = {}
        self._thread = threading.Thread(target=self._run, name="kvbus-rank", daemon=True)
        self.nudge: Callable[[], None] = lambda: None
        """Wakes the engine's scheduler, which may be waiting for nothing but this rank."""

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._inbox.put(None)
        self._thread.join(2.0)

    # From the link's thread.

    def hear(self, message: Message) -> None:
        """A message for this engine."""
        if isinstance(message, PushDone):
            self._inbox.put(self._hint)
            return
        self._inbox.put(lambda: self._receive(message))

    def seen(self, card: EngineCard) -> None:
        """A peer lives: shake hands with it now, outside any transfer."""
        self._inbox.put(lambda: self._meet(card))

    def gone(self, engine_id: str) -> None:
        """A peer is gone: write no more to it, and forget it."""
        self._inbox.put(lambda: self._part(engine_id))

    # From the engine's thread.

    def step(self, orders: StepOrders, ready: Any) -> None:
        """Take a step's orders. `ready` is an event of the device after which the step's blocks are computed."""
        if orders.expected:
            with self._lock:
                for expect in orders.expected:
                    self.landing.expect(expect)
        if orders:
            self._inbox.put(lambda: self._take(orders, ready))

    def before_forward(self, orders: StepOrders) -> None:
        """Preempted source blocks are about to be reused: wait until no WRITE reads them."""
        if not orders.preempted:
            return
        quiet = threading.Event()
        self._inbox.put(lambda: self._when_quiet(orders.preempted, quiet))
        if not quiet.wait(PREEMPT_WAIT_S):
            log.error("preemption_waited_too_long", transfers=len(orders.preempted))

    def take_quiet(self) -> Counter[str]:
        """Transfers of kept conversations that are over on this rank: what the scheduler is told in this step."""
        with self._lock:
            quiet, self._quiet = self._quiet, Counter()
        return quiet

    def results(self, orders: StepOrders) -> tuple[set[str], set[str], set[str]]:
        """(sent, received, of these failed): what vLLM is told in this step."""
        with self._changed:
            for request_id, failed in orders.concluded.items():
                self.landing.conclude(request_id, failed=failed)
            if orders.hinted:
                self._changed.wait_for(lambda: not any(map(self.landing.is_open, orders.hinted)), HINT_WAIT_S)
            sent, self._sent = self._sent, set()
            reports = self.landing.take_reports()
        return sent, reports.finished, reports.failed

    # The rank's own thread.

    def _run(self) -> None:
        while True:
            try:
                if not self._turn():
                    return
            except Exception:
                log.exception("rank_thread_failed")
                time.sleep(0.05)

    def _turn(self) -> bool:
        try:
            work = self._inbox.get(timeout=self._pause_s())
            while True:
                if work is None:
                    return False
                self._do(work())
                work = self._inbox.get_nowait()
        except queue.Empty:
            pass
        self._poll_writes()
        if self.landing.waiting():
            self._read_notes()
        if self._waiting_for:
            self._retry()
        return True

    def _pause_s(self) -> float | None:
        if self._open:
            return POLL_WRITES_S
        if self.landing.waiting():
            return POLL_HINTED_S if time.monotonic() < self._hinted_until_s else POLL_NOTES_S
        return 0.05 if self._waiting_for else None

    def _do(self, moves: Moves | None) -> None:
        if moves is None:
            return
        for write in moves.writes:
            self._submit(write)
        self.link.post(moves.posts)
        if moves.sent:
            with self._changed:
                served = {name for name in moves.sent if name.startswith(SERVED)}
                self._sent.update(set(moves.sent) - served)
                self._quiet.update(name.removeprefix(SERVED) for name in served)
                self._changed.notify_all()
            self.nudge()

    def _take(self, orders: StepOrders, ready: Any) -> Moves:
        now_s = time.monotonic()
        self._present()
        moves = Moves()
        for terms in orders.admitted:
            moves.add(self.writing.admit(terms, now_s))
        for progress in orders.progress:
            if ready is not None:
                self._ready[progress.transfer_id] = ready
            moves.add(self.writing.progress(progress, now_s))
        for transfer_id in orders.dropped:
            moves.add(self.writing.drop(transfer_id))
        for transfer_id in orders.released:
            moves.add(self.writing.release(transfer_id))
        for transfer_id in orders.held:
            self._ready.pop(transfer_id, None)
            moves.add(self.writing.hold(transfer_id))
        return moves

    def _submit(self, write: Write) -> None:
        """Checked immediately before the bytes move: presence, and the connection to exactly that incarnation."""
        if not (self._present() and self.plane.connected(write.consumer_id, write.consumer_incarnation)):
            self._waiting_for[write.write_id] = write
            return
        now_s = time.monotonic()
        try:
            handles = self.plane.submit(write, self._ready.get(write.transfer_id))
        except Exception as error:
            log.exception("write_not_submitted", transfer_id=write.transfer_id)
            self._do(self.writing.write_ended(write, ok=False, now_s=now_s, detail=repr(error)))
            return
        self.writing.submitted(write, now_s)
        self._open[write.write_id] = (write, handles)
        self._poll_writes()

    def _retry(self) -> None:
        """WRITEs that wait for a handshake: go when it is there, fail when the lease or the peer is gone."""
        now_s = time.monotonic()
        for write_id, write in list(self._waiting_for.items()):
            push = self.writing.pushes.get(write.transfer_id)
            present = self._present()
            if push is None or push.dead or now_s >= push.lease_end_s or self.writing.is_void(push):
                del self._waiting_for[write_id]
                self._do(self.writing.write_ended(write, ok=False, now_s=now_s, detail="no connection to the consumer"))
            elif present and self.plane.connected(write.consumer_id, write.consumer_incarnation):
                del self._waiting_for[write_id]
                self._submit(write)

    def _poll_writes(self) -> None:
        now_s = time.monotonic()
        overdue = self.writing.overdue(now_s, WRITE_MAX_S) if self._open else set()
        for write_id, (write, handles) in list(self._open.items()):
            state = state_of(self.plane, handles)
            if state == "pending" and write_id in overdue and self.plane.abort(handles):
                state = "failed"
            if state != "pending":
                del self._open[write_id]
                self._do(self.writing.write_ended(write, ok=state == "done", now_s=time.monotonic()))

    def _read_notes(self) -> None:
        for note in self.plane.notes():
            landed = read_landing_note(note)
            if landed is None:
                log.warning("foreign_note", size=len(note))
                continue
            with self._changed:
                self.landing.landed(*landed)
                self._changed.notify_all()
        if self.landing.has_reports():
            self.nudge()

    def _hint(self) -> None:
        self._hinted_until_s = time.monotonic() + HINT_S
        self._read_notes()

    def _receive(self, message: Message) -> Moves:
        self._present()
        return self.writing.receive(message, time.monotonic())

    def _present(self) -> bool:
        """Whether this rank may write now, which the core is told too."""
        self.writing.may_write = self.link.presence_fresh(PRESENCE_LEASE_S - PRESENCE_MARGIN_S)
        self.writing.lease = self.link.lease
        return self.writing.may_write

    def _when_quiet(self, transfer_ids: list[str], quiet: threading.Event) -> None:
        pending = self._reading(transfer_ids)
        deadline_s = time.monotonic() + WRITE_MAX_S
        while pending and time.monotonic() < deadline_s:
            self._poll_writes()
            pending &= self._open.keys()
            time.sleep(POLL_WRITES_S)
        quiet.set()

    def _reading(self, transfer_ids: list[str]) -> set[str]:
        """These transfers lose their source blocks now. Returns the WRITEs that still read them; those that wait for a
        handshake must not start any more."""
        for write in [write for write in self._waiting_for.values() if write.transfer_id in transfer_ids]:
            del self._waiting_for[write.write_id]
            now_s = time.monotonic()
            self._do(self.writing.write_ended(write, ok=False, now_s=now_s, detail="preempted before the handshake"))
        return self.writing.preempted(transfer_ids) & self._open.keys()

    def _meet(self, card: EngineCard) -> Moves | None:
        before = self.acquaintance.replaced_by(card)
        if before is not None:
            self._do(self._forget(before))
        if not self.acquaintance.meet(card):
            return None
        self._present()
        return self.writing.fire_all(time.monotonic())

    def _met(self, card: EngineCard, error: str) -> Moves:
        self.acquaintance.ended(card, error)
        if error:
            return self._give_up(card, error)
        self._retry()
        self._present()
        return self.writing.fire_all(time.monotonic())

    def _give_up(self, card: EngineCard, error: str) -> Moves:
        """WRITEs that waited for a handshake that has failed."""
        moves = Moves()
        for write_id, write in list(self._waiting_for.items()):
            if (write.consumer_id, write.consumer_incarnation) == (card.engine_id, card.incarnation):
                del self._waiting_for[write_id]
                moves.add(self.writing.write_ended(write, ok=False, now_s=time.monotonic(), detail=error))
        return moves

    def _part(self, engine_id: str) -> Moves | None:
        card = self.acquaintance.gone(engine_id)
        return self._forget(card) if card is not None else None

    def _forget(self, card: EngineCard) -> Moves:
        """What is being written to that incarnation is broken off before NIXL forgets it."""
        moves = self.writing.consumer_gone(card.engine_id, card.incarnation)
        for write_id, (write, handles) in list(self._open.items()):
            gone = (write.consumer_id, write.consumer_incarnation) == (card.engine_id, card.incarnation)
            if gone and self.plane.abort(handles):
                del self._open[write_id]
                now_s = time.monotonic()
                moves.add(self.writing.write_ended(write, ok=False, now_s=now_s, detail="the consumer has gone"))
        self.acquaintance.forget(card)
        return moves

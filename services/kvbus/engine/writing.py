"""One producer rank: which blocks may be written now, and when this rank is quiet.

A block is written when three things are true: the order names its destination, the forward pass that computed it
has ended, and the transfer is alive (no tombstone, lease not over, our own presence renewed). Each block is written
once. A rank is *quiet* for a transfer when it is tombstoned and no WRITE of it is in flight; only then does it say
PushQuiesced, and only then does it report the request as sent.

This is a core: facts and the time in, `Moves` out; the thread around it posts the WRITEs and polls their handles.
"""

from kvbus.engine.facts import Progress, Terms, blocks_for
from kvbus.engine.pushes import Moves, Push, Speaker, Write, both_prompts
from kvbus_schemas import CancelOrdered, Message, PushOrdered, TransferClosed
from kvbus_schemas.transfer import QuiesceState

TRANSFERS_MAX = 8192
"""Orders that are kept without a request of ours; the oldest go first."""

__all__ = ["Moves", "Push", "Write", "WritingCore"]


class WritingCore:
    """All pushes of one producer rank. `block_bytes` is what one block of this rank weighs, all layers."""

    def __init__(self, me: str, rank: int, ranks: int, block_size: int, block_bytes: int, *, progressive: bool) -> None:
        self.me = me
        self.speaker = Speaker(me, rank, ranks)
        self.block_size, self.block_bytes = block_size, block_bytes
        self.progressive = progressive
        self.pushes: dict[str, Push] = {}
        self.tombstones: dict[str, None] = {}
        self._writes = 0

    # What the scheduler says.

    def admit(self, terms: Terms, now_s: float) -> Moves:
        """A request of ours is the producer of this transfer."""
        push = self._push(terms.transfer_id)
        push.terms = terms
        if terms.transfer_id in self.tombstones or whole_of(terms.transfer_id) in self.tombstones:
            push.dead = True
        return self._fire(push, now_s)

    def progress(self, progress: Progress, now_s: float) -> Moves:
        """A forward pass has ended."""
        push = self.pushes.get(progress.transfer_id)
        if push is None:
            return Moves()
        if progress.restarted:
            push.source = []
        push.source[progress.first :] = progress.block_ids
        push.ready = progress.ready_blocks
        if progress.final and not push.final:
            push.final, push.final_s = True, now_s
            push.tail_bytes = self._unwritten(push) * self.block_bytes
        return self._fire(push, now_s)

    def hold(self, transfer_id: str) -> Moves:
        """The request has finished: report it as sent once all is written."""
        push = self.pushes.get(transfer_id)
        if push is None:
            return Moves()
        push.held = True
        return self._settle(push)

    def release(self, transfer_id: str) -> Moves:
        """The transfer is over: write no more."""
        push = self.pushes.get(transfer_id)
        if push is None:
            return Moves()
        push.dead = True
        return self._settle(push)

    def drop(self, transfer_id: str) -> Moves:
        """The request has ended before anything was computed: write nothing, report nothing."""
        push = self.pushes.get(transfer_id)
        if push is None:
            return Moves()
        push.dead, push.terms = True, None
        return self._settle(push)

    # What the bus says.

    def receive(self, message: Message, now_s: float) -> Moves:
        """Take a message that is for this engine; repeats change nothing."""
        match message:
            case PushOrdered():
                return self._ordered(message, now_s)
            case CancelOrdered():
                return self._cancelled(message)
            case TransferClosed():
                return self._closed(message.transfer_id)
            case _:
                return Moves()

    # What the data plane says.

    def submitted(self, write: Write, now_s: float) -> None:
        """A WRITE was posted."""
        push = self.pushes[write.transfer_id]
        push.first_write_s = push.first_write_s or now_s
        push.last_submit_s = now_s
        push.writes += 1

    def write_ended(self, write: Write, *, ok: bool, now_s: float, detail: str = "") -> Moves:
        """A WRITE is done, or will never be. Its blocks are no longer touched either way."""
        push = self.pushes[write.transfer_id]
        first, count, _ = push.in_flight.pop(write.write_id)
        moves = Moves()
        if ok:
            push.written.append((first, count))
            push.bytes += count * self.block_bytes
        elif not push.failed:
            push.failed = push.dead = True
            moves.posts.append(self.speaker.failure(push, detail or "the WRITE failed"))
        moves.add(self._done(push, now_s))
        moves.add(self._settle(push))
        return moves

    def refused(self, transfer_id: str, detail: str) -> Moves:
        """The order cannot be carried out at all (no connection to the consumer, say)."""
        push = self.pushes.get(transfer_id)
        if push is None or push.failed:
            return Moves()
        push.failed = push.dead = True
        moves = Moves(posts=[self.speaker.failure(push, detail)] if push.order else [])
        moves.add(self._settle(push))
        return moves

    def consumer_gone(self, engine_id: str, incarnation: str) -> Moves:
        """A consumer has died: stop writing to it."""
        moves = Moves()
        for push in list(self.pushes.values()):
            order = push.order
            if order and (order.consumer_id, order.consumer_incarnation) == (engine_id, incarnation):
                push.dead = True
                moves.add(self._settle(push))
        return moves

    def preempted(self, transfer_ids: list[str]) -> set[str]:
        """These transfers lose their source blocks: nothing is written from them any more, until a progress names new
        ones. Returns the WRITEs that still read them."""
        pushes = [self.pushes[transfer_id] for transfer_id in transfer_ids if transfer_id in self.pushes]
        for push in pushes:
            push.source, push.ready = [], 0
        return {write_id for push in pushes for write_id in push.in_flight}

    def overdue(self, now_s: float, write_max_s: float) -> set[str]:
        """WRITEs that have taken longer than a WRITE may."""
        return {
            write_id
            for push in self.pushes.values()
            for write_id, (_, _, since_s) in push.in_flight.items()
            if now_s - since_s > write_max_s
        }

    def fire_all(self, now_s: float) -> Moves:
        """Try again what was waiting for our presence or a connection."""
        moves = Moves()
        for push in list(self.pushes.values()):
            moves.add(self._fire(push, now_s))
        return moves

    # The rules.

    may_write: bool = True
    """Our own presence is renewed. Set by the thread around this core immediately before it fires."""
    lease: int = 0
    """Lease of our own card, 0 while it is not known; set with `may_write`."""

    def is_void(self, push: Push) -> bool:
        """Our card has lapsed since the order was given: its consumer may count us as fenced and have freed."""
        return push.order is not None and 0 < push.order.producer_lease < self.lease

    def _ordered(self, order: PushOrdered, now_s: float) -> Moves:
        if order.transfer_id in self.tombstones:
            return Moves()
        push = self._push(order.transfer_id)
        if push.order is not None:
            push.lease_end_s = max(push.lease_end_s, now_s + order.lease_s)
            return Moves()
        push.order, push.next = order, order.first_block
        push.ordered_s, push.lease_end_s = now_s, now_s + order.lease_s
        return self._fire(push, now_s)

    def _cancelled(self, order: CancelOrdered) -> Moves:
        push = self.pushes.get(order.transfer_id)
        if push is None and order.consumer_id == self.me:  # ours to consume: its producer's ranks answer
            return Moves()
        if push is None:
            moves = self._cancel_parts(order)
            state: QuiesceState = "finished" if order.transfer_id in self.tombstones else "never_started"
            self._entomb(order.transfer_id)
            if order.consumer_id:
                moves.posts.append(self.speaker.quiet(order.transfer_id, order.consumer_id, state))
            return moves
        return self._cancel(push, order)

    def _cancel(self, push: Push, order: CancelOrdered) -> Moves:
        push.dead = True
        push.ask_quiet = order.consumer_id or push.ask_quiet
        return self._settle(push)

    def _cancel_parts(self, order: CancelOrdered) -> Moves:
        """A router knows a request with several prompts by one name; each prompt has its own transfer."""
        moves = Moves()
        for push in [push for push in self.pushes.values() if whole_of(push.transfer_id) == order.transfer_id]:
            moves.add(self._cancel(push, order))
        return moves

    def _closed(self, transfer_id: str) -> Moves:
        """The consumer's last word. It may come before our request has its first block, which then holds nothing."""
        if transfer_id in self.pushes:
            return self.release(transfer_id)
        self._entomb(transfer_id)
        return Moves()

    def _fire(self, push: Push, now_s: float) -> Moves:
        order, terms = push.order, push.terms
        if order is None or terms is None or push.dead or not self.may_write:
            return Moves()
        if self.is_void(push):
            return self.refused(push.transfer_id, "our presence has lapsed since the order was given")
        if order.producer_lease > self.lease > 0 or now_s >= push.lease_end_s:
            return Moves()  # our own newer card is on its way to us, or nobody waits any more
        if (order.prompt_digest, order.token_count) != (terms.prompt_digest, terms.token_count):
            return self.refused(push.transfer_id, "the prompts differ: " + both_prompts(order, terms))
        end = min(push.ready, order.first_block + len(order.block_ids[0]))
        if end <= push.next or not (self.progressive or push.final):
            return Moves()
        return Moves(writes=[self._write(push, order, end, now_s)])

    def _write(self, push: Push, order: PushOrdered, end: int, now_s: float) -> Write:
        self._writes += 1
        write = Write(
            write_id=f"w{self._writes}",
            transfer_id=push.transfer_id,
            consumer_id=order.consumer_id,
            consumer_incarnation=order.consumer_incarnation,
            first=push.next,
            source_blocks=tuple(push.source[push.next : end]),
            target_blocks=tuple(order.block_ids[0][push.next - order.first_block : end - order.first_block]),
        )
        assert len(write.source_blocks) == len(write.target_blocks), write
        push.in_flight[write.write_id] = (push.next, end - push.next, now_s)
        push.next = end
        return write

    def _complete(self, push: Push) -> bool:
        if push.order is None or not push.final or push.in_flight:
            return False
        return push.next >= blocks_for(push.order.token_count, self.block_size)

    def _done(self, push: Push, now_s: float) -> Moves:
        if push.done_said or push.failed or not self._complete(push):
            return Moves()
        push.done_said = True
        return Moves(posts=[self.speaker.done(push, now_s)])

    def _settle(self, push: Push) -> Moves:
        """Say what there is to say once nothing of this transfer is in flight any more."""
        moves = Moves()
        complete = self._complete(push)
        if push.in_flight or not (complete or push.dead):
            return moves
        if push.ask_quiet:
            state: QuiesceState = "failed" if push.failed else "finished" if push.written else "never_started"
            moves.posts.append(self.speaker.quiet(push.transfer_id, push.ask_quiet, state))
            push.ask_quiet = ""
        if push.held and push.terms and not push.sent_said:
            push.sent_said = True
            moves.sent.append(push.terms.request_id)
        if push.sent_said or push.terms is None:
            del self.pushes[push.transfer_id]
            self._entomb(push.transfer_id)
        return moves

    def _push(self, transfer_id: str) -> Push:
        push = self.pushes.get(transfer_id)
        if push is None:
            push = self.pushes[transfer_id] = Push(transfer_id)
            self._bound()
        return push

    def _bound(self) -> None:
        if len(self.pushes) > TRANSFERS_MAX:
            idle = next((p for p in self.pushes.values() if p.terms is None), None)
            if idle is not None:
                del self.pushes[idle.transfer_id]

    def _entomb(self, transfer_id: str) -> None:
        self.tombstones[transfer_id] = None
        if len(self.tombstones) > TRANSFERS_MAX:
            del self.tombstones[next(iter(self.tombstones))]

    def _unwritten(self, push: Push) -> int:
        if push.order is None:
            return push.ready
        done = sum(count for _, count in push.written)
        return max(push.ready - push.order.first_block - done, 0)


def whole_of(transfer_id: str) -> str:
    """The transfer that a router named, of which this is a part (of several prompts) or the whole."""
    return transfer_id.partition("-")[0]

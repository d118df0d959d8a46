"""The matcher's core inside a prefill engine: setting `matcher = engine`.

It pairs only this engine's own transfers. Its card has the capability `matcher`, upon which matcher processes leave
them alone. It saves the hop to another process and back; there is no standby: it lives and dies with its engine.
"""

from time import monotonic

from kvbus.bus import Bus
from kvbus.engine.facts import MATCHER
from kvbus.matcher.core import MatcherCore
from kvbus_schemas import (
    BlocksReady,
    BlocksRegistered,
    BlocksUnavailable,
    CancelOrdered,
    EngineCard,
    Message,
    TransferClosed,
    subjects,
)


class OwnMatcher:
    """Runs on the link's loop."""

    def __init__(self, engine_id: str) -> None:
        self.engine_id = engine_id
        self.core = MatcherCore()
        self._bus: Bus | None = None

    async def attach(self, bus: Bus) -> None:
        """Hear what matchers hear."""
        self._bus = bus
        told = [subjects.of_kind(kind, to=MATCHER) for kind in (BlocksRegistered, BlocksReady)]
        ends = [subjects.of_kind(kind) for kind in (BlocksUnavailable, TransferClosed, CancelOrdered)]
        for subject in told + ends:
            await bus.subscribe(subject, self._hear)

    async def seen(self, card: EngineCard) -> None:
        assert self._bus is not None
        await self._bus.post(self.core.engine_seen(card, monotonic()))

    async def gone(self, engine_id: str, incarnation: str) -> None:
        assert self._bus is not None
        await self._bus.post(self.core.engine_gone(engine_id, incarnation, monotonic()))

    async def tick(self) -> None:
        assert self._bus is not None
        await self._bus.post(self.core.tick(monotonic()))

    async def _hear(self, message: Message) -> None:
        assert self._bus is not None
        producer_id = getattr(message, "producer_id", self.engine_id)
        said_by_us = isinstance(message, BlocksUnavailable) and message.source != message.producer_id
        if producer_id == self.engine_id and not said_by_us:
            await self._bus.post(self.core.receive(message, monotonic()))

"""The rules of DESIGN.md section 7 that are not checked where memory is touched: ends, and blocks that come back."""

from collections import Counter
from typing import TYPE_CHECKING

from kvbus.sim.bus import Station
from kvbus.sim.engine import SimEngine
from kvbus_schemas import BlocksRegistered, Post, TransferClosed

if TYPE_CHECKING:
    from kvbus.sim.run import Sim


class Rules:
    """Watches what is said, and judges a world at rest."""

    def __init__(self, sim: "Sim") -> None:
        self.sim, self.world = sim, sim.world
        self.registered: dict[str, tuple[str, str]] = {}
        self.closed: Counter[str] = Counter()

    def said(self, station: Station, post: Post) -> None:
        """Rule 2: exactly one end for each transfer."""
        message = post.message
        if isinstance(message, BlocksRegistered):
            self.registered[message.transfer_id] = (message.consumer_id, message.consumer_incarnation)
        elif isinstance(message, TransferClosed):
            self.closed[message.transfer_id] += 1
            self.world.counts[f"closed {message.outcome}"] += 1
            if self.closed[message.transfer_id] > 1:
                self.world.violate("2", message.transfer_id, f"{station.name} closes it again, as {message.outcome}")

    def at_rest(self) -> None:
        """Nothing goes wrong any more, and all deadlines are long over."""
        for engine in self.sim.engines.values():
            if engine.process.alive:
                self._engine_at_rest(engine)
        for transfer_id, (consumer_id, incarnation) in self.registered.items():
            engine = self.sim.engines[consumer_id]
            if engine.identity.incarnation == incarnation and self.closed[transfer_id] != 1:
                self.world.violate("2", transfer_id, f"{consumer_id} registered it and never closed it")
        for job in self.sim.router.jobs:
            self.world.counts[f"client {job.outcome}"] += 1
            if not job.outcome:
                transfer_id = job.transfer_ids[-1] if job.transfer_ids else ""
                self.world.violate("2", transfer_id, f"the client of {job.facts.request_id} has no answer")

    def _engine_at_rest(self, engine: SimEngine) -> None:
        for transfer_id in [*engine.side.consumer.open, *engine.side.producer.open]:
            self.world.violate("2", transfer_id, f"{engine.name} has not ended it")
        for request in engine.loop.requests.values():
            text = f"{engine.name} still has {request.request_id}, {request.status}, with blocks {request.block_ids}"
            self.world.violate("3", request.transfer_id, text)
        memory = engine.memory
        if len(memory.free) != len(memory.blocks):
            text = f"{len(memory.blocks) - len(memory.free)} of {len(memory.blocks)} blocks did not come back"
            self.world.violate("3", "", f"{engine.name}: {text}")
        for rank in engine.ranks:
            pushes = [push.transfer_id for push in rank.writing.pushes.values() if push.terms or push.in_flight]
            for transfer_id in [*rank.landing.open, *pushes]:
                self.world.violate("2", transfer_id, f"{rank.process.name} has it open")

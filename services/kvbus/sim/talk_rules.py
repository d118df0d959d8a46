"""Rule 5, and what the other rules say of conversations: who offers what, who claims it, who serves it, how it ends."""

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from kvbus.sim.bus import Station
from kvbus.sim.engine import SimEngine
from kvbus.sim.rules import Rules
from kvbus.sim.turns import TurnJob
from kvbus.sim.weather import DRIFT_MAX
from kvbus_schemas import BlocksUnavailable, Post, ReuseAnswered, ReuseOffered, ReuseReleased, TransferClosed

if TYPE_CHECKING:
    from kvbus.sim.run import Sim

GENTLE = frozenset({"delay", "write", "handshake", "drift", "memory", "matcher", "legs", "nixl", "leave"})
"""Kinds of fault under which no word of a router or an engine is lost."""
DELAY_MAX_S = 1.0
"""An answer that is later than the router waits for it cannot be let go."""
LATE = frozenset({"delay", "duplicate", "pause", "partition", "nats", "reuse"})
"""Kinds under which an offer can be heard after its end. It is then granted, and its holder refuses it."""


class Offer(NamedTuple):
    conversation: str
    engine_id: str
    incarnation: str
    until_s: float
    """World time of its end; its holder's clock may be a little off."""


class TalkRules(Rules):
    """Watches offers, claims and ends, and each engine after each step."""

    def __init__(self, sim: "Sim") -> None:
        super().__init__(sim)
        self.offers: dict[str, Offer] = {}
        self.claims: dict[str, str] = {}
        """By transfer: the offer."""
        self.let_go: set[str] = set()
        self.served: dict[str, str] = {}
        """By offer: the transfer that its holder writes."""
        self._claimed: Counter[str] = Counter()
        self._begun: set[tuple[str, str]] = set()
        """Transfers, and the incarnation that has begun to write them."""

    def said(self, station: Station, post: Post) -> None:
        super().said(station, post)
        message = post.message
        if isinstance(message, ReuseOffered):
            until_s = self.world.now + message.remaining_s
            offer = Offer(message.conversation, message.engine_id, station.incarnation, until_s)
            self.offers[f"{message.engine_id}:{message.offer_id}"] = offer
        elif isinstance(message, ReuseAnswered):
            self._answered(message)
        elif isinstance(message, ReuseReleased | TransferClosed):
            self.let_go.add(message.transfer_id)
        elif isinstance(message, BlocksUnavailable):
            self._refused(station, message)

    def _refused(self, station: Station, message: BlocksUnavailable) -> None:
        served = (message.transfer_id, station.incarnation) in self._begun and station.name == message.producer_id
        if served and message.reason == "unknown":
            text = f"{station.name} served it and answers the repeated order with {message.detail!r}"
            self.world.violate("6", message.transfer_id, text)

    def after_step(self, engine: SimEngine) -> None:
        """An engine has scheduled: what has it begun to serve?"""
        retention = engine.side.reuse.retention
        for transfer_id, held_as in retention.serving.items():
            offer_id = f"{engine.identity.engine_id}:{held_as}"
            before = self.served.setdefault(offer_id, transfer_id)
            if before != transfer_id:
                self._violate(transfer_id, f"{engine.name} serves {offer_id}, which it served to {before}")
            offer = self.offers.get(offer_id)
            if offer is None or (offer.engine_id, offer.incarnation) != (
                engine.identity.engine_id, engine.identity.incarnation
            ):  # fmt: skip
                self._violate(transfer_id, f"{engine.name} serves {offer_id}, which is {offer}")
            claim = self.claims.get(transfer_id)
            if claim != offer_id:
                self._violate(transfer_id, f"{engine.name} serves {offer_id} to a transfer that claimed {claim}")
            begun = (transfer_id, engine.identity.incarnation)
            if before == transfer_id and begun not in self._begun:
                self._begun.add(begun)
                late_s = self.world.local_s() - retention.offers[held_as].expires_s
                if late_s > 0:
                    self._violate(transfer_id, f"{engine.name} begins to serve {offer_id} {late_s:.3f} s after its end")

    def at_rest(self) -> None:
        super().at_rest()
        for job in self.sim.router.jobs:
            if isinstance(job, TurnJob) and job.facts.conversation:
                self.world.counts["turn hit" if job.turn.tokens and not job.turn.is_open else "turn miss"] += 1
        self.world.counts["claimed"] += len(self.claims)
        self.world.counts["given back"] += sum(self.closed[transfer_id] > 0 for transfer_id in self.claims)
        vanished = any(job.vanished for job in self.sim.router.jobs if isinstance(job, TurnJob))
        weather = self.sim.weather
        if weather.kinds <= GENTLE and weather.delay_max_s <= DELAY_MAX_S and not vanished:
            for transfer_id in self.claims.keys() - self.let_go:
                self.world.violate("2", transfer_id, f"the claim of {self.claims[transfer_id]} has no end")

    def _engine_at_rest(self, engine: SimEngine) -> None:
        super()._engine_at_rest(engine)
        side = engine.side
        left = {
            "offers": side.reuse.retention.offers,
            "transfers it serves": side.reuse.retention.serving,
            "claims": side.reuse.claims,
            "quiet ranks": side.reuse.quiet_ranks,
            "deadlines": side.reuse.wanted_until_s,
            "tickets": side.tickets._known,  # noqa: SLF001  (what is left over in it is a leak)
        }
        for what, there in left.items():
            if there:
                self.world.violate("3", "", f"{engine.name} still has {what}: {list(there)}")

    def _answered(self, answer: ReuseAnswered) -> None:
        grant = answer.grant
        if grant is None or not grant.transfer_id:
            return
        offer_id = f"{grant.holder_id}:{grant.offer_id}"
        self.claims[grant.transfer_id] = offer_id
        self._claimed[offer_id] += 1
        offer = self.offers.get(offer_id)
        granted = (answer.conversation, grant.holder_id, grant.holder_incarnation)
        if offer is None or offer[:3] != granted or grant.conversation != answer.conversation:
            self._violate(grant.transfer_id, f"the grant is of {granted}, the offer of {offer}")
            return
        over = self.world.now > offer.until_s * (1.0 + 2.0 * DRIFT_MAX)
        if self._claimed[offer_id] > 1 and not over:
            self._violate(grant.transfer_id, f"offer {offer_id} is claimed again")
        if over and not self.sim.weather.kinds & LATE:
            self._violate(grant.transfer_id, f"offer {offer_id} is claimed after its end at {offer.until_s:.3f} s")

    def _violate(self, transfer_id: str, text: str) -> None:
        self.world.violate("5", transfer_id, text)

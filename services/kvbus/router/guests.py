"""Who chooses the engines of a request: the router's policy, a guest on the bus, or a canary; and shadows beside.

The shell of `asking`: sends questions, waits for at most the deadline, and falls back on the policy in every case that
is not an answer that can be used. No request fails for a guest, and none waits for a shadow.
"""

import asyncio
import functools
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable

import structlog
from msgspec.structs import replace

from kvbus.bus import Bus
from kvbus.bus.bounded import end
from kvbus.errors import BusError, ConfigError
from kvbus.router import policies
from kvbus.router.asking import Asks, Heard
from kvbus.router.basis import GUEST
from kvbus.router.bodies import Asked
from kvbus.router.canary import CANARY_KEY, CANARY_TTL_MAX_S, Canary, decoded
from kvbus.router.chooser import Chooser, Chosen, PolicyFailed, Situation
from kvbus.router.core import Dispatch
from kvbus.router.guest_metrics import GuestMetrics
from kvbus.router.identity import fresh_id
from kvbus.router.offered import offered_in
from kvbus.router.policies import Policy, RouteQuestion
from kvbus.router.settings import RouterSettings
from kvbus_schemas import EVERYONE, AnyMessage, Post, RouteAnswered, RouteAsked, subjects

OUTBOX_MAX = 1024
"""Questions to shadows that wait to be sent; beyond it they are left out and counted."""
GRACE_TURNS = 4
"""Turns of the event loop from bytes on the socket to an answer: a busy router must not call late what is in time."""
WARN_EVERY_S = 10.0
"""Of each guest and outcome one line in the log in so long."""
QUIET = frozenset({"used", "agreed", "differed", "stray"})
"""Outcomes that are no fault. With several workers of one name each hears the others' answers as strays."""

log = structlog.get_logger(__name__)

Make = Callable[[Situation], RouteQuestion]
Publish = Callable[[Iterable[Post]], Awaitable[None]]


class Guests:
    """`choose` and `choose_decode`. Raises ConfigError on names that cannot stand in a subject."""

    def __init__(
        self, settings: RouterSettings, chooser: Chooser, metrics: GuestMetrics, *, name: str, publish: Publish
    ) -> None:
        self.canary: Canary | None = None
        self._guest = settings.guest
        self._deadline_ms = settings.guest_deadline_ms
        self._shadows = settings.shadows
        self._chooser = chooser
        self._metrics = metrics
        self._name = name
        self._publish = publish
        self._bus: Bus | None = None
        self._asks = Asks()
        self._waiting: dict[str, asyncio.Future[Heard]] = {}
        self._outbox: deque[Post] = deque()
        self._sending: asyncio.Task[None] | None = None
        self._canary_policy: Policy | None = None
        self._said: dict[tuple[str, str], tuple[float, int]] = {}
        for guest in (*filter(None, [self._guest]), *self._shadows):
            _check_name(guest)
            self._asks.label(guest)

    async def joined(self, bus: Bus) -> None:
        """The router is on the bus. Raises BusError."""
        answers = subjects.of_kind(RouteAnswered, to=self._name)
        await bus.subscribe(answers, self._on_answer, rejected=self._on_rejected)
        try:
            bucket = await bus.bucket(subjects.ROUTING_BUCKET, ttl_hint_s=CANARY_TTL_MAX_S, storage="file")
            await bucket.watch(self._on_canary)
        except BusError as error:
            log.warning("canary_unavailable", error=str(error), hint="run `kvbus auth init` and `provision` again")
        self._bus = bus

    async def choose(self, asked: Asked, request_id: str, situation: Situation, transfer_id: str) -> Chosen:
        """The engines for a dispatch. Takes at most `guest_deadline_ms` longer than the policy. Raises RouterProblem
        where there are none."""
        make = functools.partial(self._chooser.question, asked, request_id)
        return await self._decide(make, situation, transfer_id)

    async def choose_decode(self, asked: Asked, dispatch: Dispatch, situation: Situation) -> Chosen:
        """Mode deferred: the decode, once prefill is done."""
        assert dispatch.prefill is not None
        request_id, prefill = dispatch.facts.request_id, dispatch.prefill

        def make(now: Situation) -> RouteQuestion:
            return self._chooser.decode_question(asked, request_id, prefill, now)

        return await self._decide(make, situation, dispatch.transfer_id)

    async def close(self) -> None:
        """Send no more questions."""
        if self._sending is not None:
            await end(self._sending)

    # Deciding

    async def _decide(self, make: Make, situation: Situation, transfer_id: str) -> Chosen:
        question = make(situation)
        canary = self.canary
        is_canary = canary is not None and canary.takes(question.conversation, question.request_id)
        guest = canary.guest if canary is not None and is_canary else self._guest
        if guest:
            chosen = await self._by_guest(guest, question, make, situation, transfer_id, canary=is_canary)
        elif is_canary:
            chosen = self._by_canary_policy(question)
        else:
            chosen = self._chooser.decide(question)
        self._metrics.decided("canary" if is_canary else "main", chosen.basis.policy).inc()
        if self._shadows:
            self._ask_shadows(question, chosen, transfer_id, decided_by=guest)
        return chosen

    async def _by_guest(
        self, guest: str, question: RouteQuestion, make: Make, situation: Situation, transfer_id: str, *, canary: bool
    ) -> Chosen:
        heard = await self._ask(guest, question, transfer_id)
        choice = heard.choice
        if choice is not None:
            engines = self._chooser.fleet.engines
            if all(name in engines for name in (choice.prefill_id, choice.decode_id) if name):
                return self._chooser.chosen(question, choice, f"{GUEST}{guest}", canary=canary)
            heard = Heard(guest=guest, outcome="gone", why="the engine that it chose has gone meanwhile")
            self._note(heard)
        fresh = make(replace(situation, now_s=time.monotonic()))
        return _noting(self._chooser.decide(fresh, canary=canary), f"fallback from guest {guest}: {heard.why}")

    def _by_canary_policy(self, question: RouteQuestion) -> Chosen:
        why = "it cannot be loaded"
        try:
            if self._canary_policy is not None:
                return self._chooser.decide(question, self._canary_policy, canary=True)
        except PolicyFailed as error:
            why = error.message
        self._warn("canary", "failed", why)
        return _noting(self._chooser.decide(question, canary=True), f"fallback from the canary: {why}")

    async def _ask(self, guest: str, question: RouteQuestion, transfer_id: str) -> Heard:
        """Ask, and wait for the end of the question."""
        ask_id = fresh_id()
        bus = self._bus
        if bus is None or not bus.connected:
            return self._note(Heard(guest=guest, outcome="unasked", why="NATS cannot be reached"))
        refused = self._asks.open(ask_id, guest, offered_in(question), time.monotonic())
        if refused is not None:
            return self._note(refused)
        loop = asyncio.get_running_loop()
        waiting: asyncio.Future[Heard] = loop.create_future()
        self._waiting[ask_id] = waiting
        timer = loop.call_later(self._deadline_ms / 1000.0, self._expire, ask_id, GRACE_TURNS)
        try:
            await bus.publish(_asked(question, ask_id, transfer_id, self._deadline_ms), guest)
            return await waiting
        except (BusError, ValueError) as error:
            return self._note(self._asks.unsent(ask_id, str(error)))
        finally:
            timer.cancel()
            del self._waiting[ask_id]
            self._asks.withdraw(ask_id)

    def _ask_shadows(self, question: RouteQuestion, chosen: Chosen, transfer_id: str, *, decided_by: str) -> None:
        names = [name for name in self._shadows if name != decided_by]
        if len(self._outbox) + len(names) > OUTBOX_MAX:
            for name in names:
                self._note(Heard(guest=name, outcome="unasked", why="too many questions wait", shadow=True))
            return
        ask_id, choice = fresh_id(), chosen.choice
        to = frozenset() if EVERYONE in names else frozenset(names)
        self._asks.shadow(ask_id, to, offered_in(question), (choice.mode, choice.prefill_id, choice.decode_id))
        message = replace(_asked(question, ask_id, transfer_id, self._deadline_ms), shadow=True)
        self._outbox.extend(Post(name, message) for name in (names if to else [EVERYONE]))
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send(), name="shadow-questions")

    async def _send(self) -> None:
        while self._outbox:
            await self._publish([self._outbox.popleft()])

    # What comes in

    def _on_answer(self, message: AnyMessage) -> None:
        if isinstance(message, RouteAnswered):
            self._settle(self._asks.answered(message, time.monotonic()))

    def _on_rejected(self, subject: str, _why: str) -> None:
        source, _, ask_id = subject.split(".")[-3:]
        self._settle(self._asks.undecodable(ask_id, source, time.monotonic()))

    def _expire(self, ask_id: str, turns_left: int) -> None:
        """The deadline has passed; what has arrived by then, and waits to be read, still counts."""
        if ask_id not in self._waiting:
            return
        if turns_left:
            asyncio.get_running_loop().call_soon(self._expire, ask_id, turns_left - 1)
            return
        heard = self._asks.expired(ask_id, self._deadline_ms, time.monotonic())
        if heard is not None:
            self._settle(heard)

    def _settle(self, heard: Heard) -> None:
        self._note(heard)
        waiting = self._waiting.get(heard.ask_id) if heard.settles else None
        if waiting is not None and not waiting.done():
            waiting.set_result(heard)

    def _on_canary(self, key: str, value: bytes | None) -> None:
        if key != CANARY_KEY:
            return
        try:
            canary = decoded(value) if value is not None else None
            policy = policies.load(canary.policy) if canary is not None and canary.policy else None
        except ConfigError as error:
            log.warning("canary_refused", error=str(error))
            canary = policy = None
        self.canary, self._canary_policy = canary, policy
        self._metrics.share(canary.share if canary else 0.0)
        if canary is not None and canary.guest:
            self._asks.label(canary.guest)
        log.info("canary", name=canary.name if canary else "", share=canary.share if canary else 0.0)

    # What is seen of it

    def _note(self, heard: Heard) -> Heard:
        counter = self._metrics.shadowed if heard.shadow else self._metrics.answered
        counter(heard.guest, heard.outcome).inc()
        if heard.outcome == "used":
            self._metrics.took(heard.guest).observe(heard.took_s)
        elif heard.outcome not in QUIET:
            self._warn(heard.guest, heard.outcome, heard.why)
        if heard.turned:
            log.warning("guest_rests" if heard.turned == "rests" else "guest_is_back", guest=heard.guest)
            self._metrics.rests(heard.guest, heard.turned == "rests")
        return heard

    def _warn(self, guest: str, outcome: str, why: str) -> None:
        """One line in WARN_EVERY_S, which says how many it stands for."""
        now_s = time.monotonic()
        said_s, kept_back = self._said.get((guest, outcome), (float("-inf"), 0))
        if now_s - said_s < WARN_EVERY_S:
            self._said[guest, outcome] = (said_s, kept_back + 1)
            return
        self._said[guest, outcome] = (now_s, 0)
        log.warning("guest_answer", guest=guest, outcome=outcome, why=why, kept_back=kept_back)


def _asked(question: RouteQuestion, ask_id: str, transfer_id: str, deadline_ms: float) -> RouteAsked:
    return RouteAsked(
        ask_id=ask_id,
        request_id=question.request_id,
        model=question.model,
        prompt_bytes=question.prompt_bytes,
        engines=[*question.prefills, *question.decodes],
        deadline_ms=deadline_ms,
        conversation=question.conversation,
        asked=question.asked,
        part=question.part,
        attempt=question.attempt,
        transfer_id=transfer_id,
        prompt_tokens=question.prompt_tokens,
        head=question.head,
    )


def _noting(chosen: Chosen, note: str) -> Chosen:
    """`chosen`, with a note behind its reason."""
    return replace(chosen, choice=replace(chosen.choice, reason=f"{chosen.choice.reason}; {note}"))


def _check_name(name: str) -> None:
    try:
        subjects.token(name)
    except subjects.SubjectTokenError as error:
        raise ConfigError(str(error)) from None

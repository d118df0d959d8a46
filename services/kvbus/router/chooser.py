"""From the fleet to a policy's question, and from its answer to engines. The policy is somebody else's code: what it
answers is checked. Pure but for the policy."""

from collections.abc import Mapping

import msgspec

from kvbus.router.basis import Basis, basis_of
from kvbus.router.bodies import Asked
from kvbus.router.cache_index import State
from kvbus.router.cache_prompt import NOTHING_READ, Reading
from kvbus.router.fleet import Engine, Fleet, compatible, rested
from kvbus.router.offered import offered_in
from kvbus.router.policies import Policy, RouteChoice, RouteQuestion
from kvbus.router.problems import BadRequestError, BusyError, RouterProblem
from kvbus_schemas import EngineView, Mode


class PolicyFailed(RouterProblem):
    """The policy raised, or chose what it was not offered."""

    def __init__(self, policy: str, why: str) -> None:
        super().__init__(f"routing policy {policy!r} failed: {why}", status=500, code="policy_failed")


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """What holds at the moment of a choice. `asked` is the mode in the client's header."""

    now_s: float
    bus_connected: bool
    asked: Mode | None
    attempt: int
    tried: frozenset[str] = frozenset()
    """Engines that failed this request already."""
    retry_after_s: int = 2
    conversation: str = ""
    holder_id: str = ""
    """The decode that holds the conversation, and how many tokens of it."""
    held_tokens: int = 0
    reading: Reading = NOTHING_READ
    """What is known of the prompt."""
    caches: Mapping[str, State] = {}
    """How well each engine's prefix cache is known."""

    def views(self, engines: list[Engine]) -> list[EngineView]:
        """The engines as a policy sees them, without those that failed."""
        return [
            engine.view(self.now_s, self._hit(engine), self.caches.get(engine.engine_id, ""))
            for engine in rested(engines, self.now_s, self.tried)
        ]

    def _hit(self, engine: Engine) -> int:
        """What the engine holds of the prompt, or, as a prefill, gets back of its conversation."""
        cached = self.reading.hits.get(engine.engine_id, 0)
        if engine.role == "prefill" or engine.engine_id == self.holder_id:
            return max(cached, self.held_tokens)
        return cached


class Chosen(msgspec.Struct, frozen=True, kw_only=True):
    """A choice, its engines, and what it rests on."""

    choice: RouteChoice
    prefill: Engine | None
    decode: Engine | None
    basis: Basis


class Chooser:
    """Asks `policy` about the engines of `fleet`."""

    def __init__(self, fleet: Fleet, policy: Policy) -> None:
        self.fleet = fleet
        self.policy = policy

    def may_split(self, asked: Asked, situation: Situation) -> bool:
        """Whether the request may go to a prefill and a decode of the bus, so that its conversation is worth asking
        for. Raises RouterProblem where `choose` would."""
        mode, static = self._world(asked, situation)
        return (
            not static
            and mode in {None, "early", "deferred"}
            and bool(self._alive("prefill", asked.model, static=False))
        )

    def choose(self, asked: Asked, request_id: str, situation: Situation) -> Chosen:
        """The policy's engines for a dispatch. Raises RouterProblem."""
        return self.decide(self.question(asked, request_id, situation))

    def question(self, asked: Asked, request_id: str, situation: Situation) -> RouteQuestion:
        """Who may serve a dispatch. Raises RouterProblem where nobody may."""
        mode, static = self._world(asked, situation)
        decodes = self._alive("decode", asked.model, static=static)
        if not decodes:
            raise self._nobody(situation)
        prefills = [] if mode == "local" else self._alive("prefill", asked.model, static=static)
        prefills, decodes = compatible(prefills, decodes) if prefills else ([], decodes)
        return RouteQuestion(
            request_id=request_id,
            model=asked.model,
            prompt_bytes=len(asked.body),
            prefills=situation.views(prefills),
            decodes=situation.views(decodes),
            conversation=situation.conversation,
            asked=mode,
            attempt=situation.attempt,
            prompt_tokens=situation.reading.tokens,
            head=situation.reading.head,
            free=mode == "pull" and situation.asked is None,
        )

    def decode_question(self, asked: Asked, request_id: str, prefill: Engine, situation: Situation) -> RouteQuestion:
        """Mode deferred: who may decode, once prefill is done. Raises RouterProblem where nobody may."""
        decodes = self._alive("decode", asked.model, static=False)
        fitting = [engine for engine in decodes if engine.compat_hash == prefill.compat_hash]
        if not fitting:
            raise self._nobody(situation)
        return RouteQuestion(
            request_id=request_id,
            model=asked.model,
            prompt_bytes=len(asked.body),
            prefills=(),
            decodes=situation.views(fitting),
            conversation=situation.conversation,
            asked="deferred",
            part="decode",
            attempt=situation.attempt,
            prompt_tokens=situation.reading.tokens,
            head=situation.reading.head,
        )

    def decide(self, question: RouteQuestion, policy: Policy | None = None, *, canary: bool = False) -> Chosen:
        """Ask `policy`, or the router's own. Raises PolicyFailed."""
        policy = policy or self.policy
        try:
            choice = policy.choose(question)
        except Exception as error:
            raise PolicyFailed(policy.name, repr(error)) from error
        return self.chosen(question, choice, policy.name, canary=canary)

    def chosen(self, question: RouteQuestion, choice: RouteChoice, policy: str, *, canary: bool = False) -> Chosen:
        """The engines that `policy` has chosen. Raises PolicyFailed where it may not."""
        fault = offered_in(question).fault(choice.mode, choice.prefill_id, choice.decode_id)
        if fault is not None:
            raise PolicyFailed(policy, fault.why)
        engines = self.fleet.engines
        return Chosen(
            choice=choice,
            prefill=engines[choice.prefill_id] if choice.prefill_id else None,
            decode=engines[choice.decode_id] if choice.decode_id else None,
            basis=basis_of(question, choice, policy, canary=canary),
        )

    def _world(self, asked: Asked, situation: Situation) -> tuple[Mode | None, bool]:
        """The mode to ask the policy for, and whether among the static engines instead of those on the bus."""
        has_static = bool(self.fleet.alive("decode", static=True))
        has_bus = bool(self.fleet.alive("decode", static=False))
        wants = situation.asked
        if wants == "pull" and not has_static:
            raise BadRequestError(
                "mode pull needs stock engines: start the router with --static prefill=URL,decode=URL",
                code="mode_unavailable",
            )
        if wants in {"early", "deferred"} and not situation.bus_connected:
            raise BusyError(
                f"mode {wants} needs NATS, which this router cannot reach now: try again",
                code="bus_lost",
                retry_after_s=situation.retry_after_s,
            )
        if wants == "pull" or (has_static and not has_bus and wants in {None, "local"}):
            return ("pull" if asked.single and not asked.local_reason and wants != "local" else "local"), True
        if wants is None and not situation.bus_connected:
            return "local", False
        return ("local" if asked.local_reason else wants), False

    def _alive(self, role: str, model: str, *, static: bool) -> list[Engine]:
        engines = self.fleet.alive("prefill" if role == "prefill" else "decode", static=static)
        return engines if static else self.fleet.serving(engines, model)

    def _nobody(self, situation: Situation) -> BusyError:
        if not situation.bus_connected:
            return BusyError(
                "NATS cannot be reached, so no engine is known: start it, or give --nats",
                code="bus_lost",
                retry_after_s=situation.retry_after_s,
            )
        return BusyError(
            "no decode engine is alive for this request: start one with `kvbus engine decode MODEL`",
            code="no_decode_engine",
            retry_after_s=situation.retry_after_s,
        )

"""One client's request, through as many dispatches as it takes: sends the legs, reports facts to the core, obeys."""

import asyncio
import time

import msgspec

from kvbus.router import bodies
from kvbus.router.answer import GIVEN_UP, Answer, given_up
from kvbus.router.bodies import Asked
from kvbus.router.cache_prompt import NOTHING_READ
from kvbus.router.chooser import Situation
from kvbus.router.core import DETAIL_CHARS_MAX, ENGINE_FAULT, Dispatch, Facts, Leg, Verdict, deadline_problem
from kvbus.router.http import LegError, Reply, Request
from kvbus.router.identity import Identity, fresh_id
from kvbus.router.legs import Legs, Parts
from kvbus.router.problems import RouterProblem
from kvbus.router.turn import Turn
from kvbus_schemas import Mode, Post

ERROR_FIRST = b'data: {"error"'
"""How vLLM begins a stream that failed before its first token, with status 200."""

TICKET_REFUSED = b'"invalid_ticket"'
BAD_REQUEST = 400

_json = msgspec.json.Encoder()


class Serving:
    """`run` returns when the client has its answer; it raises RouterProblem when nothing was sent to the client."""

    def __init__(
        self,
        parts: Parts,
        request: Request,
        reply: Reply,
        *,
        asked: Asked,
        identity: Identity,
        mode: Mode | None,
        turn: Turn,
    ) -> None:
        self.request = request
        self.dispatch: Dispatch | None = None
        self._answer = Answer(request, reply, identity)
        self.result = self._answer.result
        self._parts = parts
        self._asked = asked
        self.identity = identity
        self._mode = mode
        self._turn = turn
        self._reading = NOTHING_READ
        self._deadline_at_s = request.arrived_s + parts.settings.deadline_s
        self._legs = Legs(parts, request, identity)
        self._facts = Facts(
            request_id=identity.request_id,
            trace_id=identity.trace_id,
            span_id=identity.span_id,
            conversation=turn.conversation,
            prompt_bytes=len(asked.body),
            parts=asked.parts,
            attempts_max=1 if asked.kind == "other" else parts.settings.attempts_max,
        )

    async def run(self) -> None:
        """Serve."""
        try:
            async with asyncio.timeout(max(0.0, self._deadline_at_s - time.monotonic())):
                attempt = 1
                while not await self._attempt(attempt):
                    attempt += 1
                    self._parts.retried()
        except TimeoutError:
            if self.dispatch is None:
                raise deadline_problem() from None
            await self._obey(self.dispatch, self.dispatch.deadline_passed())
        except (asyncio.CancelledError, ConnectionError):
            if self._answer.complete:
                return
            if self.dispatch is not None:
                await self._obey(self.dispatch, self.dispatch.client_left())
            raise
        finally:
            if self._legs.prefill_task is None:  # else the leg itself ends the claim
                await self._parts.post(self._turn.let_go("not_dispatched"))
            self.result.reuse = self._turn.said

    # One dispatch

    async def _attempt(self, attempt: int) -> bool:
        """One dispatch. False: another one is wanted."""
        if attempt == 1 and self._turn.conversation and self._may_split():
            prefills = self._parts.chooser.fleet.alive("prefill", static=False)
            await self._parts.reuse.claim(self._turn, self.identity.request_id, prefills)
        dispatch, decided_us = await self._new_dispatch(attempt)
        dispatch.after_ms = round((time.monotonic() - self.request.arrived_s) * 1e3, 3)
        self.dispatch = dispatch
        await self._parts.post((*self._bind(dispatch), dispatch.decided(decided_us)))
        if dispatch.mode == "early":
            return await self._early(dispatch)
        if dispatch.mode == "local":
            return await self._decode_leg(dispatch, self._local_body(dispatch))
        return await self._prefill_first(dispatch)

    def _local_body(self, dispatch: Dispatch) -> bytes:
        """What decode computes by itself it keeps for the conversation's next turn, if there is a prefill for that."""
        if not self._turn.conversation or not self._parts.chooser.fleet.alive("prefill", static=False):
            return self._asked.body
        return bodies.decode_body(self._asked, _params(dispatch, "decode"))

    async def _new_dispatch(self, attempt: int) -> tuple[Dispatch, int]:
        started_ns = time.perf_counter_ns()
        transfer_id = fresh_id()
        self._reading = reading = self._parts.caching.read(self._asked)
        chosen = await self._parts.guests.choose(
            self._asked, self.identity.request_id, self._situation(attempt), transfer_id
        )
        dispatch = Dispatch(
            self._facts,
            chosen.choice,
            transfer_id=transfer_id,
            attempt=attempt,
            deadline_s=self._transfer_deadline_s(),
            prefill=chosen.prefill,
            decode=chosen.decode,
            basis=chosen.basis,
        )
        worker = chosen.prefill or chosen.decode
        if worker is not None and reading.prompt is not None:
            dispatch.work_tokens = reading.work(worker.engine_id)
            self._parts.caching.sent(transfer_id, reading, chosen.choice.mode)
        return dispatch, (time.perf_counter_ns() - started_ns) // 1000

    def _may_split(self) -> bool:
        return self._parts.chooser.may_split(self._asked, self._situation(1))

    def _bind(self, dispatch: Dispatch) -> tuple[Post, ...]:
        """The dispatch takes the claim along, if it can use it and no earlier one has had it."""
        turn = self._turn
        if not turn.is_open:
            return ()
        assert turn.grant is not None
        holder = self._parts.chooser.fleet.engines.get(turn.grant.holder_id)
        posts = turn.bind(dispatch.mode, dispatch.prefill, holder)
        dispatch.reuse = turn.grant
        return posts

    def _situation(self, attempt: int) -> Situation:
        grant = self._turn.grant if attempt == 1 else None
        return Situation(
            now_s=time.monotonic(),
            bus_connected=self._parts.bus_connected,
            asked=self._mode,
            attempt=attempt,
            tried=frozenset(self._legs.tried),
            retry_after_s=self._parts.settings.retry_after_s,
            conversation=self._turn.conversation,
            holder_id=grant.holder_id if grant else "",
            held_tokens=grant.token_count if grant else 0,
            reading=self._reading,
            caches=self._parts.caching.states,
        )

    def _transfer_deadline_s(self) -> float:
        remaining_s = max(0.001, self._deadline_at_s - time.monotonic())
        return round(min(remaining_s, self._parts.settings.transfer_deadline_s), 3)

    async def _early(self, dispatch: Dispatch) -> bool:
        """Both legs at once; the answer is decode's."""
        to_prefill = bodies.prefill_body(self._asked, _params(dispatch, "prefill"))
        to_decode = bodies.decode_body(self._asked, _params(dispatch, "decode"))
        self._legs.prefill_task = asyncio.create_task(self._prefill_beside(dispatch, to_prefill))
        try:
            return await self._decode_leg(dispatch, to_decode)
        finally:
            self._parts.linger(self._legs.prefill_task)

    async def _prefill_beside(self, dispatch: Dispatch, body: bytes) -> None:
        verdict, _ = await self._prefill_leg(dispatch, body)
        await self._obey(dispatch, verdict)

    async def _prefill_first(self, dispatch: Dispatch) -> bool:
        """Modes deferred and pull: prefill, then decode with what prefill left."""
        pull = dispatch.mode == "pull"
        to_prefill = bodies.prefill_body(self._asked, bodies.PULL_PARAMS if pull else _params(dispatch, "prefill"))
        verdict, answer = await self._prefill_leg(dispatch, to_prefill)
        await self._obey(dispatch, verdict)
        if verdict.step == "retry":
            return False
        if verdict.step == "pass_on":
            self.result.reuse = self._turn.said
            self._answer.whole(dispatch, self._legs.exchanges["prefill"], answer)
            return True
        params = bodies.params_of(answer) if pull else await self._decode_chosen(dispatch)
        return await self._decode_leg(
            dispatch, bodies.decode_body(self._asked, params) if params is not None else self._asked.body
        )

    async def _decode_chosen(self, dispatch: Dispatch) -> bytes:
        assert dispatch.prefill is not None
        started_ns = time.perf_counter_ns()
        try:
            chosen = await self._parts.guests.choose_decode(self._asked, dispatch, self._situation(dispatch.attempt))
        except RouterProblem:
            await self._obey(dispatch, dispatch.undecided())
            raise
        assert chosen.decode is not None
        dispatch.decode_chosen(chosen.choice, chosen.decode, self._transfer_deadline_s(), chosen.basis)
        await self._parts.post((dispatch.decided((time.perf_counter_ns() - started_ns) // 1000),))
        return _params(dispatch, "decode")

    # Legs

    async def _prefill_leg(self, dispatch: Dispatch, body: bytes) -> tuple[Verdict, bytes]:
        assert dispatch.prefill is not None
        answer = b""
        try:
            exchange = await self._legs.send(dispatch, "prefill", body)
            answer = await exchange.whole(self._parts.settings.prefill_answer_bytes_max)
            refused = _ticket_refused(exchange.status, answer)
            verdict = dispatch.answered("prefill", exchange.status, ticket_refused=refused)
            failed = refused or exchange.status >= ENGINE_FAULT
        except LegError as error:
            verdict = dispatch.failed("prefill", str(error))
            failed = True
        except asyncio.CancelledError:
            await self._parts.post(self._turn.let_go("prefill_closed"))
            raise
        finally:
            self._legs.over(dispatch, "prefill")
        if failed:
            self._legs.engine_failed(dispatch, "prefill")
        if self._turn.is_open:
            params = bodies.params_of(answer)
            posts = self._turn.let_go("prefill_failed") if failed else self._turn.reported(params)
            await self._parts.post(posts)
        return verdict, answer

    async def _decode_leg(self, dispatch: Dispatch, body: bytes) -> bool:
        """The leg that the client's answer comes from. False: another dispatch is wanted."""
        assert dispatch.decode is not None
        try:
            verdict = await self._decode_verdict(dispatch, body)
            await self._obey(dispatch, verdict)
            if verdict.step == "retry":
                return False
            await self._pass_on(dispatch)
            return True
        finally:
            self._legs.over(dispatch, "decode")

    async def _pass_on(self, dispatch: Dispatch) -> None:
        assert dispatch.decode is not None
        await self._hear_of_reuse(dispatch)
        try:
            await self._answer.pass_on(dispatch, self._legs.exchanges["decode"])
            dispatch.ended()
            self._parts.reuse.ended(self._turn, dispatch.mode)
        except LegError as error:
            self._legs.engine_failed(dispatch, "decode")
            await self._obey(dispatch, dispatch.failed("decode", str(error)))

    async def _hear_of_reuse(self, dispatch: Dispatch) -> None:
        """Hold the answer's head until prefill has said what it took over, for a moment."""
        task = self._legs.prefill_task
        if self._turn.is_open and dispatch.mode == "early" and task is not None:
            await asyncio.wait({task}, timeout=self._parts.settings.reuse_report_ms / 1000.0)
        self.result.reuse = self._turn.said

    async def _decode_verdict(self, dispatch: Dispatch, body: bytes) -> Verdict:
        assert dispatch.decode is not None
        try:
            exchange = await self._legs.send(dispatch, "decode", body)
            first = await exchange.first_bytes()
        except LegError as error:
            self._legs.engine_failed(dispatch, "decode")
            return dispatch.failed("decode", str(error))
        if given_up(first):
            verdict = dispatch.failed("decode", GIVEN_UP)
        elif first.startswith(ERROR_FIRST) and dispatch.attempt < self._facts.attempts_max:
            verdict = dispatch.failed("decode", first[:DETAIL_CHARS_MAX].decode(errors="replace"))
        else:
            refused = _ticket_refused(exchange.status, first)
            verdict = dispatch.answered("decode", exchange.status, ticket_refused=refused)
        if verdict.step == "retry":
            self._legs.engine_failed(dispatch, "decode")
        return verdict

    # Verdicts

    async def _obey(self, dispatch: Dispatch, verdict: Verdict) -> None:
        """Publish, close legs; raise what ends the request without an answer from an engine."""
        posts = verdict.posts
        for leg in verdict.close:
            self._legs.close(leg)
            if leg == "prefill":
                posts += self._turn.let_go("prefill_closed")
        if posts:
            await self._parts.post(posts)
        if verdict.step == "retry":
            await self._parts.post(dispatch.served("retried", 0, error=str(verdict.problem)))
        elif verdict.step == "give_up":
            assert verdict.problem is not None
            raise verdict.problem
        elif verdict.step == "break_off":
            assert verdict.problem is not None
            await self._answer.break_off(verdict.problem)


def _ticket_refused(status: int, body: bytes) -> bool:
    """Whether an engine says that the ticket is not for it, or no longer (`kvbus.engine.ticket_guard`)."""
    return status == BAD_REQUEST and TICKET_REFUSED in body


def _params(dispatch: Dispatch, leg: Leg) -> bytes:
    return _json.encode({"kvbus": dispatch.ticket(leg)})

"""One replay of `kvbus bench workload`: light engines that keep conversations for one lifetime, and the sessions."""

import asyncio
import contextlib
import os
import random
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from kvbus.bench.workload_trace import Scale, Script, Session
from kvbus.errors import CommandFailed
from kvbus.local.fleet import Fleet, FleetOptions, start_fleet
from kvbus_schemas import LoadReported, Message, subjects

BLOCK_SIZE = 4
"""Tokens in a light engine's block: with 64 tokens of the trace in one, 256 of the trace's."""
BLOCKS = 60_000
"""So many that nothing is let go for want of room: what is measured is the lifetime."""
MIN_TOKENS = 1
MARGIN_S = 1.0
"""The reuse process's margin, in the trace's time."""
SAMPLE_S = 0.1
START_SHARE = 0.25
"""Sessions begin, evenly spread by chance, within this share of the window."""
OK = 200


class Replayed(msgspec.Struct):
    """What happened."""

    turns: int = 0
    later: int = 0
    prompt_tokens: int = 0
    saved: int = 0
    hits: int = 0
    misses: Counter[str] = msgspec.field(default_factory=Counter)
    """Of turns that are not the first, by reason."""
    expired_sessions: int = 0
    """Sessions with at least one turn that came too late."""
    held: list[int] = []
    """Blocks that decode kept for conversations, every SAMPLE_S."""
    latencies_s: list[float] = []
    took_s: float = 0.0


async def replay(sessions: list[Session], scale: Scale, lifetime_s: float, work_dir: Path) -> Replayed:
    """Start everything, send the sessions through the router, stop it. Raises CommandFailed."""
    options = FleetOptions(
        model="light",
        engine="sim",
        work_dir=work_dir,
        engine_settings={"reuse_ttl_s": f"{lifetime_s / scale.time:g}", "reuse_min_tokens": str(MIN_TOKENS)}
        | {"reuse_blocks_max": "0.9"},
        engine_arguments=_engine_arguments(scale),
    )
    settings = {
        "KVBUS_REUSE_MIN_TOKENS": str(MIN_TOKENS),
        "KVBUS_REUSE_MARGIN_S": f"{MARGIN_S / scale.time:g}",
        "KVBUS_ROUTER_REUSE_ASK_MS": "2000",
        "KVBUS_LOG_LEVEL": "warning",
    }
    with _environment(settings):
        async with start_fleet(options) as fleet:
            return await _replay(sessions, scale, fleet)


def _engine_arguments(scale: Scale) -> list[str]:
    length = str(2 * scale.prompt_max)
    given = {"--block-size": str(BLOCK_SIZE), "--blocks": str(BLOCKS), "--max-model-len": length}
    given |= {"--max-num-batched-tokens": length, "--prefill-tokens-per-s": "0", "--token-us": "100"}
    return [word for pair in given.items() for word in pair]


async def _replay(sessions: list[Session], scale: Scale, fleet: Fleet) -> Replayed:
    done, chance, held = Replayed(), random.Random(scale.seed), _Held()  # noqa: S311  (when sessions begin)
    assert fleet.bus is not None
    listening = await fleet.bus.subscribe(subjects.of_kind(LoadReported), held.hear)
    clock = asyncio.get_running_loop()
    since_s = clock.time()
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:
        sampling = asyncio.create_task(held.sample(done.held))
        starts = [chance.random() * START_SHARE * scale.window_s / scale.time for _ in sessions]
        client = _Client(http, fleet.base_url, done, scale)
        try:
            async with asyncio.TaskGroup() as group:
                for number, (session, start_s) in enumerate(zip(sessions, starts, strict=True)):
                    group.create_task(client.session(Script(session, number), start_s))
        except* (CommandFailed, aiohttp.ClientError, TimeoutError) as failed:
            raise CommandFailed(f"a session failed: {failed.exceptions[0]!r}: see {fleet.log_dir}") from failed
        finally:
            sampling.cancel()
            await listening.stop()
    done.took_s = clock.time() - since_s
    return done


class _Held:
    """What decode says that it holds."""

    def __init__(self) -> None:
        self.blocks: dict[str, int] = {}

    async def hear(self, message: Message) -> None:
        if isinstance(message, LoadReported):
            self.blocks[message.engine_id] = message.held_blocks

    async def sample(self, into: list[int]) -> None:
        while True:
            await asyncio.sleep(SAMPLE_S)
            into.append(sum(self.blocks.values()))


class _Client:
    """Sends sessions and counts what the router says of them."""

    def __init__(self, http: aiohttp.ClientSession, url: str, done: Replayed, scale: Scale) -> None:
        self._http, self._url, self.done, self._scale = http, url, done, scale

    async def session(self, script: Script, start_s: float) -> None:
        """All turns, each after its pause."""
        await asyncio.sleep(start_s)
        conversation, expired = uuid.uuid4().hex, False
        for at, turn in enumerate(script.session.turns):
            await asyncio.sleep(turn.idle_s / self._scale.time)
            said, tokens = await self._ask(script.prompt(at), turn.answer, conversation)
            script.answered(at, tokens)
            self._count(said, len(turn.ids), first=at == 0)
            expired = expired or said == "miss reason=expired"
        self.done.expired_sessions += expired

    async def _ask(self, prompt: list[int], answer: int, conversation: str) -> tuple[str, list[int]]:
        body: dict[str, Any] = {
            "model": "light",
            "prompt": prompt,
            "max_tokens": answer,
            "ignore_eos": True,
            "return_token_ids": True,
            "conversation_id": conversation,
            "cache_salt": uuid.uuid4().hex,  # the engines' own prefix caches find nothing
        }
        clock = asyncio.get_running_loop()
        since_s = clock.time()
        async with self._http.post(self._url + "/v1/completions", json=body) as response:
            data = await response.read()
            if response.status != OK:
                raise CommandFailed(f"the router answered {response.status}: {data[:300]!r}")
            said = response.headers.get("X-Kvbus-Reuse", "miss reason=unsaid")
        self.done.latencies_s.append(clock.time() - since_s)
        tokens: list[int] = msgspec.json.decode(data)["choices"][0]["token_ids"]
        return said, tokens

    def _count(self, said: str, prompt_tokens: int, *, first: bool) -> None:
        done, reused = self.done, reused_in(said)
        done.turns, done.prompt_tokens = done.turns + 1, done.prompt_tokens + prompt_tokens
        done.later += not first
        done.saved += reused
        if reused:
            done.hits += 1
        elif not first:
            done.misses[said.rpartition("reason=")[2] if said.startswith("miss") else said] += 1


def reused_in(said: str) -> int:
    """Tokens that X-Kvbus-Reuse says were taken over."""
    kind, _, tokens = said.partition(" tokens=")
    return int(tokens.split()[0]) if kind == "hit" and tokens else 0


@contextlib.contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    """What child processes that start meanwhile inherit."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

"""Makes the recordings beside it: real runs of kvbus over light engines, written by `kvbus trace export`.

    python tests/recordings/make.py [faults] [conversations] [load]

Each takes under a minute. They are kept, and tests/test_replay_recordings.py replays them against the code of today;
make them anew only when a change of behaviour is meant, and say so in the commit.
"""

import asyncio
import contextlib
import random
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp

from kvbus.bus import Bus, BusSettings
from kvbus.bus.link import Link
from kvbus.conversations_client import ReuseClient
from kvbus.local.children import kvbus_command
from kvbus.local.fleet import Fleet, FleetOptions, start_fleet
from kvbus_schemas import encode, subjects

HERE = Path(__file__).parent
SEED = 11
SPEED = ["--prefill-tokens-per-s", "6000", "--token-us", "1000", "--max-num-batched-tokens", "256"]
WORDS = "Everything that is decided inside the engines becomes a subscriber that can be watched. "
LEASE_OUT_S = 9.0
"""A card is gone after this, and so is a lease."""
REPEAT_POLL_S = 0.02

Scenario = Callable[[Fleet, aiohttp.ClientSession], Awaitable[None]]


async def ask(
    http: aiohttp.ClientSession, fleet: Fleet, prompt: str, *, timeout_s: float = 60.0, **given: Any
) -> dict[str, Any]:
    """One completion; empty where it failed or was given up."""
    headers = {"x-kvbus-mode": given.pop("mode")} if "mode" in given else {}
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 16, "ignore_eos": True, "temperature": 0} | given
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    with contextlib.suppress(aiohttp.ClientError, TimeoutError):
        async with http.post(fleet.base_url + "/v1/completions", json=body, headers=headers, timeout=timeout) as answer:
            found: dict[str, Any] = await answer.json()
            return found
    return {}


async def faults(fleet: Fleet, http: aiohttp.ClientSession) -> None:
    """Every message of a transfer comes twice; clients leave; matcher and decode are killed and replaced."""
    rng = random.Random(SEED)

    async def burst(count: int, **given: Any) -> None:
        prompts = [f"{rng.random()} {WORDS * rng.randint(2, 20)}" for _ in range(count)]
        await asyncio.gather(*(ask(http, fleet, prompt, **given) for prompt in prompts))

    async with repeating(fleet):
        await burst(6)
        await burst(3, mode="deferred")
        await burst(4, timeout_s=0.15)
        fleet.matchers.pop().kill()
        unmatched = asyncio.create_task(burst(4))
        leaving = asyncio.create_task(burst(2, timeout_s=0.3))
        await asyncio.sleep(0.5)
        fleet.start_matcher(1)
        await asyncio.gather(unmatched, leaving)
        await burst(2)
        broken = asyncio.create_task(burst(6))
        await asyncio.sleep(0.15)
        fleet.engine("decode-0").child.kill()
        await broken
        await asyncio.sleep(LEASE_OUT_S)
        await burst(3)
        await fleet.restart_engine("decode-0")
        await fleet.wait_engines()
        await burst(6)


@contextlib.asynccontextmanager
async def repeating(fleet: Fleet) -> Any:
    """Until the end, what is said on the transfer plane is said once more, byte by byte."""
    bus = await Bus.connect(BusSettings(nats=fleet.nats_url), name="repeater", incarnation="i")
    link = await Link.open(BusSettings(nats=fleet.nats_url), "repeater")
    seen: set[tuple[str, bytes]] = set()

    async def repeat() -> None:
        heard = 0
        while True:
            async for seq, _, subject, message in bus.replay(f"{subjects.ROOT}.transfer.>", since_seq=heard):
                heard = seq
                data = encode(message)
                if (subject, data) not in seen:
                    seen.add((subject, data))
                    await link.publish(subject, data)
            await asyncio.sleep(REPEAT_POLL_S)

    task = asyncio.create_task(repeat())
    try:
        yield
    finally:
        task.cancel()
        await link.close()
        await bus.close()


async def conversations(fleet: Fleet, http: aiohttp.ClientSession) -> None:
    """Turns come back to their KV: in order, two at once, after the holder was killed, after reuse was replaced."""
    for turn in range(3):
        await asyncio.gather(*(say(http, fleet, f"c{number}", turn) for number in range(5)))
    await asyncio.gather(say(http, fleet, "c0", 3), say(http, fleet, "c0", 3))
    fleet.reuses.pop().kill()
    await asyncio.gather(*(say(http, fleet, f"c{number}", 4) for number in (1, 2)))
    fleet.start_reuse(1)
    assert fleet.bus is not None
    client = ReuseClient(fleet.bus)
    while (await client.ask("0" * 32, 1.0, claim=False)).miss == "unavailable":  # noqa: ASYNC110  (it is asked)
        await asyncio.sleep(0.05)
    await asyncio.gather(*(say(http, fleet, f"c{number}", 5) for number in range(5)))
    fleet.engine("decode-1").child.kill()
    await asyncio.gather(*(say(http, fleet, f"c{number}", 6) for number in range(5)))
    await asyncio.sleep(LEASE_OUT_S)
    await asyncio.gather(*(say(http, fleet, f"c{number}", 7) for number in range(5)))


async def say(http: aiohttp.ClientSession, fleet: Fleet, name: str, turn: int) -> None:
    """A turn: all that was said before, and a little more."""
    prompt = f"{name}: {WORDS * 3}" + "".join(f" turn {number}, {WORDS}" for number in range(turn))
    await ask(http, fleet, prompt, conversation_id=name)


async def load(fleet: Fleet, http: aiohttp.ClientSession) -> None:
    """Prompts of all lengths, at random moments, more than one engine at a time can take."""
    rng = random.Random(SEED)
    asked: list[asyncio.Task[dict[str, Any]]] = []
    for number in range(70):
        prompt = f"{number} {WORDS * rng.choice((1, 2, 4, 8, 16, 32))}"
        asked.append(asyncio.create_task(ask(http, fleet, prompt, max_tokens=rng.choice((4, 16, 64)))))
        await asyncio.sleep(rng.expovariate(1 / 0.12))
    await asyncio.gather(*asked)


SCENARIOS: dict[str, Scenario] = {"faults": faults, "conversations": conversations, "load": load}


async def make(name: str) -> None:
    """Run a scenario and write its recording."""
    with tempfile.TemporaryDirectory(prefix="kvbus-recording-") as work_dir:
        options = FleetOptions(prefill=2, decode=2, engine="sim", engine_arguments=SPEED, work_dir=Path(work_dir))
        async with start_fleet(options) as fleet, aiohttp.ClientSession() as http:
            await SCENARIOS[name](fleet, http)
            await asyncio.sleep(1.0)
            out = HERE / f"{name}.jsonl"
            export = kvbus_command("trace", "export", "--nats", fleet.nats_url, "--since", "1h", "--out", str(out))
            await asyncio.to_thread(subprocess.run, export, check=True)
    print(f"{out}: {out.stat().st_size // 1024} KiB")  # noqa: T201


if __name__ == "__main__":
    for wanted in sys.argv[1:] or SCENARIOS:
        asyncio.run(make(wanted))

"""One point of `kvbus bench handoff`: some requests to one arm, and what probes, bus and /proc say about them."""

import asyncio
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from kvbus.bench import report
from kvbus.bench.handoff_arms import BLOCK_SIZE, ArmProcesses
from kvbus.bench.handoff_client import Answer, Client, load, prompt_of
from kvbus.bench.handoff_cpu import cpu_seconds_of, engine_share
from kvbus.bench.probe import FLUSH_S, Note, read_notes
from kvbus.errors import CommandFailed
from kvbus_schemas import PushDone, RequestServed, Role, RouteDecided, TransferClosed, encode, subjects

WARM_TOKENS = 96
WARM_MAX_S = 40.0
LOOK_AGAIN_S = 0.3
SETTLE_S = 2.0
"""Pause before CPU is counted: vLLM's readers spin for a second after a message."""
BLOCK_BYTES = 32 * 1024 * BLOCK_SIZE
"""KV of one block of the `small` model: 32 KB a token."""

Samples = dict[str, list[float]]


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt length in tokens, requests at a time, and how many requests a round."""

    length: int
    concurrency: int
    requests: int
    max_tokens: int = 12

    @property
    def key(self) -> str:
        return f"{self.length}_c{self.concurrency}"


class Turn(msgspec.Struct):
    """What one arm did at one point in one round."""

    samples: Samples
    answers: list[Answer]


async def warm_up(client: Client) -> None:
    """After a pause: ask until requests are handed over as they should be."""
    await client.learn()
    deadline_s = time.monotonic() + WARM_MAX_S
    for _ in range(2):
        while True:
            answer = await client.ask(prompt_of(uuid.uuid4().hex, WARM_TOKENS), 2)
            if await _pushed(client.arm, answer.request_id):
                break
            if time.monotonic() > deadline_s:
                raise CommandFailed(f"{client.arm.spec.name} hands nothing over: see {client.arm.directory}")
            await asyncio.sleep(LOOK_AGAIN_S)


async def _pushed(arm: ArmProcesses, request_id: str) -> bool:
    if arm.bus is None:
        return True
    await asyncio.sleep(0.1)
    said = [message async for *_, message in arm.bus.replay(subjects.everything_about(request_id))]
    closed = [message.outcome for message in said if isinstance(message, TransferClosed)]
    return closed == ["completed"] and any(isinstance(message, PushDone) for message in said)


async def measure(arm: ArmProcesses, point: Point, round_number: int) -> Turn:
    """The arm's turn: resume, warm up, load, pause."""
    await arm.resume()
    prompts = [prompt_of(f"{point.key}-{round_number}-{number}", point.length) for number in range(point.requests)]
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=180)) as http:
        client = Client(arm, http)
        await warm_up(client)
        cpu, since_s = cpu_seconds_of(arm), time.monotonic()
        answers = await load(client, prompts, point.max_tokens, point.concurrency)
        took_s = time.monotonic() - since_s
        used = cpu_seconds_of(arm)
        await asyncio.sleep(2 * FLUSH_S)
    samples = client_samples(answers, took_s)
    samples |= {f"cpu_ms_{name}": [(used[name] - cpu.get(name, 0.0)) * 1e3 / len(answers)] for name in sorted(used)}
    samples |= probe_samples(_notes_of(arm.probes, answers, since_s), [answer.request_id for answer in answers])
    samples |= await _bus_samples(arm, point, [answer.request_id for answer in answers])
    await arm.pause()
    return Turn(samples, answers)


async def measure_idle(arm: ArmProcesses, seconds: float) -> Samples:
    """Percent of a core of each engine: without a request, and while it only waits for the other."""
    await arm.resume()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=180)) as http:
        client = Client(arm, http)
        await warm_up(client)
        await asyncio.sleep(SETTLE_S)
        samples = {f"idle_{role}_cpu_percent": [share] for role, share in (await _shares(arm, seconds)).items()}
        waits: tuple[Role, ...] = ("prefill",) if arm.spec.legs == "pull" else ("prefill", "decode")
        for first in waits:
            prompt = prompt_of(uuid.uuid4().hex, 600)
            asked = asyncio.create_task(client.ask(prompt, 2, first=first, wait_s=seconds + 2 * SETTLE_S))
            await asyncio.sleep(SETTLE_S)
            samples[f"waiting_{first}_cpu_percent"] = [(await _shares(arm, seconds))[first]]
            await asked
    await arm.pause()
    return samples


async def _shares(arm: ArmProcesses, seconds: float) -> dict[str, float]:
    before, since_s = cpu_seconds_of(arm), time.monotonic()
    await asyncio.sleep(seconds)
    after, elapsed_s = cpu_seconds_of(arm), time.monotonic() - since_s
    return {role: engine_share(before, after, role, elapsed_s) for role in arm.engines}


def client_samples(answers: list[Answer], took_s: float) -> Samples:
    """What the client saw."""
    return {
        "ttft_ms": [answer.ttft_s * 1e3 for answer in answers],
        "tpot_ms": [answer.tpot_s * 1e3 for answer in answers],
        "answer_ms": [(answer.ttft_s + answer.tpot_s * (len(answer.tokens) - 1)) * 1e3 for answer in answers],
        "requests_per_s": [len(answers) / took_s],
    }


def probe_samples(notes: Iterable[Note], request_ids: list[str]) -> Samples:
    """Times between the points that each request passed. `notes` are of both engines of one arm."""
    passed: dict[str, dict[str, list[float]]] = {request_id: {} for request_id in request_ids}
    for note in notes:
        if note.request in passed:
            passed[note.request].setdefault(note.event, []).append(note.at_s)
    samples: Samples = {}
    for request_id in request_ids:
        for name, value_ms in _times_of(passed[request_id]).items():
            samples.setdefault(name, []).append(value_ms)
    return samples


def _times_of(passed: dict[str, list[float]]) -> dict[str, float]:
    """Prefill finishes first and decode starts last: each request starts and finishes once on either engine."""
    times: dict[str, float] = {}
    finished_s = min(passed["finished"])
    start_s = max(passed["start"])
    times["finish_to_start_ms"] = (start_s - finished_s) * 1e3
    for name, event in {"finish_to_write_ms": "write", "finish_to_posted_ms": "posted", "finish_to_landed_ms": "landed",
                        "finish_to_received_ms": "received"}.items():  # fmt: skip
        if event in passed:
            times[name] = (max(passed[event]) - finished_s) * 1e3
    if "ordered" in passed and "allocated" in passed:
        times["register_to_order_ms"] = (min(passed["ordered"]) - min(passed["allocated"])) * 1e3
    times["writes"] = len(passed.get("write", ()))
    return times


def _notes_of(probes: Path, answers: list[Answer], since_s: float) -> list[Note]:
    wanted = {answer.request_id for answer in answers}
    return [note for note in read_notes(probes) if note.at_s >= since_s and note.request in wanted]


async def _bus_samples(arm: ArmProcesses, point: Point, request_ids: list[str]) -> Samples:
    """Messages and bytes of each request, with the two that a router adds, and what was left when prefill ended."""
    if arm.bus is None:
        whole = -(-point.length // BLOCK_SIZE) * BLOCK_BYTES
        return {"tail_bytes": [float(whole)] * len(request_ids)}
    samples: Samples = {"bus_messages": [], "bus_bytes": [], "tail_bytes": []}
    for request_id in request_ids:
        said = [encode(message) for message in router_messages(request_id)]
        count, size = len(said), sum(map(len, said))
        async for _, _, subject, message in arm.bus.replay(subjects.everything_about(request_id)):
            count, size = count + 1, size + len(encode(message)) + len(subject)
            if isinstance(message, PushDone):
                samples["tail_bytes"].append(float(message.tail_bytes))
        samples["bus_messages"].append(float(count))
        samples["bus_bytes"].append(float(size))
    return samples


def router_messages(request_id: str) -> tuple[RouteDecided, RequestServed]:
    """What a router says about each request: no router runs here, so it is added."""
    shared: dict[str, Any] = {
        "source": "router-0123456789ab",
        "incarnation": request_id[:16],
        "seq": 10**6,
        "sent_unix_us": 10**15,
    }
    decided = RouteDecided(
        **shared,
        transfer_id=request_id,
        request_id=request_id,
        mode="early",
        prefill_id="prefill",
        decode_id="decode",
        policy="least_loaded",
        reason="the least loaded pair",
        trace_id=request_id,
        span_id=request_id[:16],
    )
    served = RequestServed(
        **shared,
        transfer_id=request_id,
        request_id=request_id,
        mode="early",
        outcome="completed",
        status=200,
        trace_id=request_id,
        span_id=request_id[:16],
    )
    return decided, served


def summed(rounds: dict[str, list[list[float]]]) -> dict[str, report.Metric]:
    """Each metric over all rounds."""
    return {name: report.metric(values) for name, values in sorted(rounds.items())}

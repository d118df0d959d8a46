"""`kvbus engine`: one vLLM server as a child, drained before it ends.

On SIGTERM the engine's card says `draining` (no router chooses it any more), the requests that run are finished, for
at most `drain_s`, then vLLM is stopped and the card is deleted. A second SIGTERM skips the rest of the drain.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import time

import structlog

from kvbus.bus import Bus
from kvbus.engine.launch import EngineOptions, vllm_command, vllm_environment
from kvbus.engine.settings import engine_settings
from kvbus.errors import BusError
from kvbus.process import new_incarnation, process_name
from kvbus_schemas import DrainOrdered, EngineCard, LoadReported, UndecodableError, decode, subjects

log = structlog.get_logger()

QUIET_REPORTS = 2
"""Consecutive load reports without a request after which an engine has drained."""
RESERVED_BLOCKS = 1
"""vLLM's null block is never free. More in use means that a finished prefill still holds blocks for a decode."""
VLLM_STOP_S = 20.0
_PR_SET_PDEATHSIG = 1


class Drain:
    """Watches an engine's load reports until it has nothing left to do."""

    def __init__(self) -> None:
        self.quiet = 0
        self.done = asyncio.Event()

    def heard(self, message: object) -> None:
        if not isinstance(message, LoadReported):
            return
        in_use = message.total_blocks - message.free_blocks - message.held_blocks
        busy = message.running or message.waiting or in_use > RESERVED_BLOCKS
        self.quiet = 0 if busy else self.quiet + 1
        if self.quiet >= QUIET_REPORTS:
            self.done.set()


async def serve(options: EngineOptions, drain_s: float, stopping: asyncio.Event) -> int:
    """Run vLLM until it ends or `stopping` is set; returns its exit code, 0 after a drain."""
    process = await asyncio.create_subprocess_exec(
        *vllm_command(options),
        env=vllm_environment(options),
        stdin=asyncio.subprocess.DEVNULL,
        preexec_fn=_before_exec,
    )
    ended = asyncio.create_task(process.wait())
    stop = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait({ended, stop}, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            log.error("vllm_ended", engine_id=options.engine_id, exit_code=process.returncode)
            return process.returncode or 1
        await _drain(options, drain_s, ended)
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(ended), VLLM_STOP_S)
        return 0
    finally:
        stop.cancel()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await ended
        await _forget(options)


async def _drain(options: EngineOptions, drain_s: float, ended: "asyncio.Task[int]") -> None:
    """Ask the engine to drain and wait until it has, or cannot be asked."""
    try:
        bus = await _connect(options)
    except BusError as error:
        log.warning("not_drained", engine_id=options.engine_id, error=str(error))
        return
    drain, since_s = Drain(), time.monotonic()
    try:
        await bus.subscribe(subjects.of_kind(LoadReported).removesuffix("*") + options.engine_id, drain.heard)
        await bus.publish(DrainOrdered(engine_id=options.engine_id, reason="SIGTERM"), options.engine_id)
        done = asyncio.create_task(drain.done.wait())
        await asyncio.wait({done, ended}, timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
        done.cancel()
        log.info("drained", engine_id=options.engine_id, complete=drain.done.is_set(), s=_since(since_s))
    finally:
        await bus.close()


async def _forget(options: EngineOptions) -> None:
    """Delete the card, so that nobody has to wait for it to expire."""
    with contextlib.suppress(BusError):
        bus = await _connect(options)
        try:
            bucket = await bus.bucket(subjects.ENGINES_BUCKET)
            cards: dict[str, bytes | None] = {}
            watch = await bucket.watch(cards.__setitem__, options.engine_id)  # engines may watch cards, not read keys
            if _incarnation_of(cards.get(options.engine_id) or b"") == options.incarnation:
                await bucket.delete(options.engine_id, revision=watch.revision(options.engine_id))
        finally:
            await bus.close()


def _incarnation_of(card: bytes) -> str:
    try:
        decoded = decode(card)
    except UndecodableError:
        return ""
    return decoded.incarnation if isinstance(decoded, EngineCard) else ""


async def _connect(options: EngineOptions) -> Bus:
    settings = engine_settings({"nats": options.nats, "connect_timeout_s": 2.0})
    return await Bus.connect(settings, name=process_name("engine-keeper"), incarnation=new_incarnation())


def _since(start_s: float) -> float:
    return round(time.monotonic() - start_s, 3)


def _before_exec() -> None:
    """A group of its own (uvloop takes no `process_group`): Ctrl-C on the terminal is for us, and we drain first."""
    os.setpgid(0, 0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

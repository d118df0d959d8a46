"""A router for kvbus in Python: the engine with the fewest unfinished requests. Needs nats-py, msgspec, kvbus_schemas.

python router.py NAME [nats://127.0.0.1:4222]     then: kvbus router --guest NAME, or --shadow NAME
"""

import asyncio
import os
import secrets
import sys
import time

import nats
from msgspec.structs import replace
from nats.aio.msg import Msg

from kvbus_schemas import EngineView, RouteAnswered, RouteAsked, UndecodableError, decode, encode, subjects


def choose(asked: RouteAsked) -> RouteAnswered:
    """The answer; kvbus_schemas/route.py says what each field means."""
    prefills = [engine for engine in asked.engines if engine.role == "prefill"]
    decodes = [engine for engine in asked.engines if engine.role == "decode"]
    if asked.part == "decode":  # prefill is done: only a decode is wanted
        return RouteAnswered(ask_id=asked.ask_id, mode="deferred", prefill_id="", decode_id=least(decodes))
    mode = (asked.asked or "early") if prefills else "local"
    prefill_id = "" if mode == "local" else least(prefills)
    decode_id = "" if mode == "deferred" else least(decodes)
    return RouteAnswered(ask_id=asked.ask_id, mode=mode, prefill_id=prefill_id, decode_id=decode_id, reason="idlest")


def least(engines: list[EngineView]) -> str:
    return min(engines, key=lambda engine: (engine.running + engine.waiting, engine.engine_id)).engine_id


async def main(name: str, url: str = "nats://127.0.0.1:4222") -> None:
    seed = os.environ.get("KVBUS_NKEY_SEED_FILE")  # where NATS has keys: `kvbus auth init --guest NAME`
    connection = await nats.connect(url, name=name, nkeys_seed=seed, max_reconnect_attempts=-1)
    incarnation, seq = secrets.token_hex(6), 0

    async def on_asked(msg: Msg) -> None:
        nonlocal seq
        try:
            asked = decode(msg.data)
        except UndecodableError:
            return  # of a newer kvbus, or nobody's
        if isinstance(asked, RouteAsked):
            seq += 1
            sent = time.time_ns() // 1000
            answer = replace(choose(asked), source=name, incarnation=incarnation, seq=seq, sent_unix_us=sent)
            await connection.publish(subjects.subject_of(answer, sender=name, to=asked.source), encode(answer))

    for to in (name, "all"):  # what is for this router, and what is for whoever listens
        await connection.subscribe(subjects.of_kind(RouteAsked, to=to), cb=on_asked)
    print(f"{name} answers", flush=True)  # noqa: T201
    await asyncio.Event().wait()


asyncio.run(main(*sys.argv[1:]))

"""An engine that answers at once: `python -m kvbus.bench.trivial_engine`. It speaks as much OpenAI as routers ask for,
and with --nats it is an engine on the bus. What is measured against it is the router."""

import argparse
import asyncio
import sys

import msgspec

from kvbus import process
from kvbus.bus import Bus, BusSettings
from kvbus.router.http import Reply, Request, Server, ServerLimits
from kvbus.router.problems import error_json
from kvbus_schemas import EngineCard, encode, subjects

MODEL = "trivial"
RENEW_S = 2.0
CARD_TTL_S = 6.0
JSON = (b"content-type", b"application/json")
SSE = (b"content-type", b"text/event-stream; charset=utf-8")
REMOTE = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "trivial",
    "remote_host": "127.0.0.1",
    "remote_port": 1,
    "tp_size": 1,
}
"""What a prefill leg of the pull connector brings back."""

_ANSWER = {
    "id": "cmpl-0",
    "object": "text_completion",
    "created": 0,
    "model": MODEL,
    "choices": [
        {
            "index": 0,
            "text": " ok",
            "message": {"role": "assistant", "content": " ok"},
            "logprobs": None,
            "finish_reason": "length",
        }
    ],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}
_CHUNK = {
    "id": "cmpl-0",
    "object": "text_completion",
    "choices": [{"index": 0, "text": " ok", "delta": {"content": " ok"}}],
}
_WHOLE = msgspec.json.encode(_ANSWER)
_PREFILLED = msgspec.json.encode(_ANSWER | {"kv_transfer_params": REMOTE})
_EVENT = b"data: %b\n\n" % msgspec.json.encode(_CHUNK)
_STREAMED = _EVENT + b"data: [DONE]\n\n"
_MODELS = msgspec.json.encode({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "kvbus"}]})
_INFO = msgspec.json.encode(
    {"model_path": MODEL, "served_model_name": MODEL, "tokenizer_path": "", "is_generation": True}
)

_PAGES = {
    b"/health": b"{}",
    b"/v1/models": _MODELS,
    b"/get_model_info": _INFO,
    b"/model_info": _INFO,
    b"/get_server_info": _INFO,
    b"/server_info": _INFO,
}


async def answer(request: Request, reply: Reply) -> None:
    """Everything that is asked for, at once."""
    page = _PAGES.get(request.path)
    if page is not None:
        reply.whole(200, [JSON], page)
    elif b'"do_remote_decode":true' in request.body.replace(b" ", b""):
        reply.whole(200, [JSON], _PREFILLED)
    elif b'"stream":true' in request.body or b'"stream": true' in request.body:
        await reply.start(200, [SSE], None)
        await reply.end(_STREAMED)
    else:
        reply.whole(200, [JSON], _WHOLE)


async def announce(nats: str, card: EngineCard) -> None:
    """Be an engine on the bus, for ever."""
    bus = await Bus.connect(BusSettings(nats=nats), name=card.engine_id, incarnation=card.incarnation)
    bucket = await bus.bucket(subjects.ENGINES_BUCKET, ttl_hint_s=CARD_TTL_S)
    while True:
        await bucket.put(card.engine_id, encode(bus.envelope(card)), ttl_s=CARD_TTL_S)
        await asyncio.sleep(RENEW_S)


async def serve(arguments: argparse.Namespace, stopping: asyncio.Event) -> None:
    """Listen, say where on standard output, and go on until `stopping`."""
    server = Server(answer, ServerLimits(), error_json)
    await server.start("127.0.0.1", arguments.port)
    announcing = None
    if arguments.nats:
        card = EngineCard(
            engine_id=arguments.engine_id,
            role=arguments.role,
            model=MODEL,
            http_url=f"http://127.0.0.1:{server.port}",
            block_size=16,
            num_blocks=1000,
            incarnation=process.new_incarnation(),
        )
        announcing = asyncio.create_task(announce(arguments.nats, card))
    sys.stdout.write(f"http://127.0.0.1:{server.port}\n")
    sys.stdout.flush()
    await stopping.wait()
    if announcing is not None:
        announcing.cancel()
    await server.close()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--nats", default="")
    parser.add_argument("--role", choices=("prefill", "decode"), default="decode")
    parser.add_argument("--engine-id", default="trivial")
    arguments = parser.parse_args()
    process.run(lambda stopping: serve(arguments, stopping))


if __name__ == "__main__":
    main()

"""The logic of vLLM's example proxy for disaggregated prefill, for comparison: FastAPI and httpx, round robin over
fixed lists, the prefill leg first and then the decode leg, no limits, no retries, no deadline.

`python -m kvbus.bench.example_proxy --port P --prefill URL --decode URL`
"""

import argparse
import itertools
import uuid
from collections.abc import AsyncIterator
from typing import Any

PULL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def make_app(prefills: list[str], decodes: list[str]) -> Any:
    """The proxy as an ASGI application."""
    import httpx
    from fastapi import FastAPI, Request
    from fastapi.responses import StreamingResponse

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)

    def clients(urls: list[str]) -> Any:
        # The example waits for ever.
        return itertools.cycle([httpx.AsyncClient(base_url=url, timeout=None, limits=limits) for url in urls])  # noqa: S113

    to_prefill, to_decode = clients(prefills), clients(decodes)
    app = FastAPI()

    async def prefill(path: str, asked: dict[str, Any], headers: dict[str, str]) -> dict[str, Any]:
        body = asked | {"kv_transfer_params": PULL, "stream": False, "max_tokens": 1}
        body.pop("stream_options", None)
        if "max_completion_tokens" in body:
            body["max_completion_tokens"] = 1
        answer = await next(to_prefill).post(path, json=body, headers=headers)
        answer.raise_for_status()
        params: dict[str, Any] = answer.json().get("kv_transfer_params") or {}
        return params

    async def decode(path: str, asked: dict[str, Any], headers: dict[str, str]) -> AsyncIterator[bytes]:
        async with next(to_decode).stream("POST", path, json=asked, headers=headers) as answer:
            answer.raise_for_status()
            async for chunk in answer.aiter_bytes():
                yield chunk

    async def handle(request: Request) -> StreamingResponse:
        asked = await request.json()
        headers = {"X-Request-Id": str(uuid.uuid4())}
        params = await prefill(request.url.path, asked, headers)
        if params:
            asked["kv_transfer_params"] = params
        return StreamingResponse(decode(request.url.path, asked, headers), media_type="application/json")

    handle.__annotations__["request"] = Request
    app.post("/v1/completions")(handle)
    app.post("/v1/chat/completions")(handle)
    return app


def main() -> None:
    """The command line."""
    import uvicorn

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--prefill", action="append", required=True)
    parser.add_argument("--decode", action="append", required=True)
    arguments = parser.parse_args()
    app = make_app(arguments.prefill, arguments.decode)
    uvicorn.run(app, port=arguments.port, log_level="error", access_log=False)


if __name__ == "__main__":
    main()

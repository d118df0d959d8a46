"""Which HTTP libraries a router should be made of: each pair forwards a POST to a trivial engine, in its own process
and on uvloop, and is compared with asking the engine directly.

The rule of the house is that a well-kept library beats our own code, even a slower one. Its price, measured on two
cores: asyncio protocols of our own over httptools added 95 us at one request at a time and 0.8 ms at 64 at a
time, aiohttp on both sides 200 us and 6.4 ms.

`python -m kvbus.bench.http_pairs [--quick] [--json]`. Needs aiohttp, starlette, uvicorn, httptools and httpx.
"""

import argparse
import asyncio
import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import uvloop

from kvbus.bench import http_load, report
from kvbus.local.ports import free_port

PATH = "/v1/completions"
PYTHON = sys.executable
CONCURRENCIES = (1, 64)
DROPPED = ("host", "content-length", "transfer-encoding", "connection")


def serve_aiohttp(upstream: str, port: int) -> None:
    """aiohttp on both sides, without its router and middlewares."""
    from aiohttp import ClientSession, TCPConnector, web

    async def main() -> None:
        session = ClientSession(connector=TCPConnector(limit=0), auto_decompress=False)

        async def forward(request: web.BaseRequest) -> web.StreamResponse:
            headers = {name: value for name, value in request.headers.items() if name.lower() not in DROPPED}
            body = await request.read()
            async with session.post(upstream + request.path_qs, data=body, headers=headers) as answer:
                reply = web.StreamResponse(status=answer.status, headers=_kept(answer.headers))
                reply.content_length = answer.content_length
                await reply.prepare(request)
                async for chunk in answer.content.iter_any():
                    await reply.write(chunk)
                return reply

        await asyncio.get_running_loop().create_server(web.Server(forward), "127.0.0.1", port)
        await asyncio.Event().wait()

    uvloop.run(main())


def _kept(headers: Any) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in DROPPED}


def serve_starlette_aiohttp(upstream: str, port: int) -> None:
    """starlette on uvicorn (httptools), aiohttp's client."""
    from aiohttp import ClientSession, TCPConnector
    from starlette.requests import Request
    from starlette.responses import Response, StreamingResponse

    sessions: list[ClientSession] = []

    async def forward(request: Request) -> Response:
        if not sessions:
            sessions.append(ClientSession(connector=TCPConnector(limit=0), auto_decompress=False))
        body = await request.body()
        answer = await sessions[0].post(upstream + request.url.path, data=body, headers=_kept(request.headers))

        async def chunks() -> Any:
            async for chunk in answer.content.iter_any():
                yield chunk
            answer.release()

        return StreamingResponse(chunks(), status_code=answer.status, headers=_kept(answer.headers))

    _uvicorn(forward, port)


def serve_starlette_httpx(upstream: str, port: int) -> None:
    """starlette on uvicorn (httptools), httpx's client: what vLLM's example proxies use."""
    import httpx
    from starlette.requests import Request
    from starlette.responses import Response, StreamingResponse

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    client = httpx.AsyncClient(timeout=60.0, limits=limits)

    async def forward(request: Request) -> Response:
        body = await request.body()
        asked = client.build_request("POST", upstream + request.url.path, content=body, headers=_kept(request.headers))
        answer = await client.send(asked, stream=True)

        async def chunks() -> Any:
            async for chunk in answer.aiter_raw():
                yield chunk
            await answer.aclose()

        return StreamingResponse(chunks(), status_code=answer.status_code, headers=_kept(answer.headers))

    _uvicorn(forward, port)


def _uvicorn(forward: Any, port: int) -> None:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.routing import Route

    app = Starlette(routes=[Route(PATH, forward, methods=["POST"])])
    uvicorn.run(app, port=port, loop="uvloop", http="httptools", log_level="error", access_log=False)


def serve_kvbus(upstream: str, port: int) -> None:
    """kvbus.router.http: aiohttp on both sides, with the limits and refusals of the router."""
    from kvbus.router.http import Origin, Reply, Request, Server, ServerLimits, end_to_end

    async def main() -> None:
        origin = Origin(upstream, connect_timeout_s=2.0)

        async def forward(request: Request, reply: Reply) -> None:
            exchange = await origin.send(request.method, request.target, end_to_end(request.headers), request.body)
            first = await exchange.first_bytes()
            if exchange.complete:
                reply.whole(exchange.status, end_to_end(exchange.headers), first)
                return
            await reply.start(exchange.status, end_to_end(exchange.headers), None)
            while part := await exchange.more():
                await reply.write(part)
            await reply.end()

        server = Server(forward, ServerLimits(), lambda _status, _code, message: message.encode())
        await server.start("127.0.0.1", port)
        await asyncio.Event().wait()

    uvloop.run(main())


PAIRS: dict[str, Callable[[str, int], None]] = {
    "kvbus.router.http (aiohttp both sides)": serve_kvbus,
    "aiohttp server + aiohttp client, bare": serve_aiohttp,
    "starlette/uvicorn + aiohttp client": serve_starlette_aiohttp,
    "starlette/uvicorn + httpx client": serve_starlette_httpx,
}


@contextlib.contextmanager
def _listening(command: list[str], port: int, request: bytes, log: Path) -> Iterator[tuple[str, int]]:
    with http_load.started(command, log) as process:
        url = f"http://127.0.0.1:{port}"
        http_load.wait_ready(url, request, process, log)
        yield url, process.pid


def run(*, requests: int, rounds: int) -> report.Report:
    """Every pair, in turn, `rounds` times. Latencies added to the direct one in µs, CPU in ms per 1,000 requests."""
    request = http_load.request_bytes(PATH, b'{"model": "trivial", "prompt": "%b", "max_tokens": 1}' % (b"x" * 1900))
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ports = [free_port() for _ in range(len(PAIRS) + 1)]
        engine = [PYTHON, "-m", "kvbus.bench.trivial_engine", "--port", str(ports[0])]
        direct, _ = stack.enter_context(_listening(engine, ports[0], request, directory / "engine"))
        arms = {}
        for number, name in enumerate(PAIRS, 1):
            command = [PYTHON, "-m", "kvbus.bench.http_pairs", "--serve", name, "--upstream", direct,
                       "--port", str(ports[number])]  # fmt: skip
            arms[name] = stack.enter_context(_listening(command, ports[number], request, directory / str(number)))
        return uvloop.run(_measure(direct, arms, request, requests=requests, rounds=rounds))


async def _measure(
    direct: str, arms: dict[str, tuple[str, int]], request: bytes, *, requests: int, rounds: int
) -> report.Report:
    samples: dict[str, dict[str, list[list[float]]]] = {name: {} for name in arms}
    for _ in range(rounds):
        for concurrency in CONCURRENCIES:
            base = await http_load.drive(direct, request, concurrency=concurrency, requests=requests)
            base_s = sum(base) / len(base)
            for name, (url, pid) in arms.items():
                before_s = http_load.cpu_seconds(pid)
                latencies_s = await http_load.drive(url, request, concurrency=concurrency, requests=requests)
                cpu_ms = (http_load.cpu_seconds(pid) - before_s) * 1e6 / requests
                added_us = (sum(latencies_s) / len(latencies_s) - base_s) * 1e6
                samples[name].setdefault(f"added_us_c{concurrency}", []).append([added_us])
                samples[name].setdefault(f"cpu_ms_per_1000_c{concurrency}", []).append([cpu_ms])
    return report.Report(
        bench="http_pairs",
        arms=[
            report.Arm(name, {metric: report.metric(values) for metric, values in metrics.items()})
            for name, metrics in samples.items()
        ],
        conditions={"body_bytes": len(request), "requests": requests, "rounds": rounds},
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", choices=tuple(PAIRS))
    parser.add_argument("--upstream", default="")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.serve:
        PAIRS[arguments.serve](arguments.upstream, arguments.port)
        return
    outcome = run(requests=1000, rounds=3) if arguments.quick else run(requests=3000, rounds=7)
    if arguments.json:
        sys.stdout.write(outcome.json() + "\n")
    else:
        outcome.show([f"{what}_c{at}" for at in CONCURRENCIES for what in ("added_us", "cpu_ms_per_1000")])


if __name__ == "__main__":
    main()

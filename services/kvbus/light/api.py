"""The light engine's HTTP server: OpenAI's API and vLLM's pages, as far as routers and clients of kvbus use them."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import structlog
from aiohttp import web

from kvbus.light.answers import Answering, error_body, models_body
from kvbus.light.asked import Asked, BadRequestError, check_ticket, prompts_of, read
from kvbus.light.engine import LightEngine
from kvbus.light.language import chat_prompt, tokens_of
from kvbus.light.metrics import CONTENT_TYPE, metrics_text, registry_of
from kvbus.light.request import Delta, Request
from kvbus.process import new_incarnation

log = structlog.get_logger()

BODY_BYTES_MAX = 64 * 1024 * 1024
SSE = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Api:
    """Serves one engine."""

    def __init__(self, engine: LightEngine) -> None:
        self.engine = engine
        self.model = engine.identity.model
        self.serving = 0
        """Requests whose answer is not complete."""
        self._started = int(time.time())
        self._registry = registry_of(engine)
        self.app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[_errors])
        self.app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/ping", self._health),
                web.get("/version", self._version),
                web.get("/metrics", self._metrics),
                web.get("/v1/models", self._models),
                web.post("/tokenize", self._tokenize),
                web.post("/reset_prefix_cache", self._reset),
                web.post("/v1/completions", self._completions),
                web.post("/v1/chat/completions", self._chat),
            ]
        )

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response(status=503 if self.engine.loop.failed else 200)

    async def _version(self, _request: web.Request) -> web.Response:
        return web.json_response({"version": "kvbus-light"})

    async def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=metrics_text(self._registry), headers={"Content-Type": CONTENT_TYPE})

    async def _models(self, _request: web.Request) -> web.Response:
        return _json(models_body(self.model, self.engine.settings.max_model_len, self._started))

    async def _reset(self, _request: web.Request) -> web.Response:
        self.engine.loop.inbox.put(self.engine.scheduler.reset_prefix_cache)
        return web.Response()

    async def _tokenize(self, request: web.Request) -> web.Response:
        try:
            body = msgspec.json.decode(await request.read(), type=dict[str, Any])
            if "messages" in body:
                tokens = tokens_of(chat_prompt(msgspec.convert(body["messages"], list[dict[str, Any]])))
            else:
                tokens = prompts_of(body.get("prompt"))[0]
        except msgspec.MsgspecError as error:
            raise BadRequestError(f"the body does not fit: {error}") from error
        answer = {"tokens": tokens, "count": len(tokens), "max_model_len": self.engine.settings.max_model_len}
        return _json(msgspec.json.encode(answer))

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, chat=False)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, chat=True)

    async def _answer(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        me = self.engine.identity
        asked = read(await request.read(), self.engine.settings, self.model, chat=chat)
        check_ticket(asked.body.kv_transfer_params, me.engine_id, me.incarnation)
        answering = Answering(asked, new_incarnation(), self.model)
        self.serving += 1
        try:
            if asked.body.stream:
                response = web.StreamResponse(headers=SSE)
                with contextlib.suppress(ConnectionError):  # the client left
                    await self._stream(request, response, answering)
                return response
            async for _ in self._grow(answering):
                pass
            if answering.aborted:
                raise BadRequestError("the engine has failed: its log says why", kind="EngineError", status=500)
            return _json(answering.whole())
        finally:
            self.serving -= 1

    async def _stream(self, request: web.Request, response: web.StreamResponse, answering: Answering) -> None:
        await response.prepare(request)
        for opening in answering.opening():
            await response.write(opening)
        async for index, delta in self._grow(answering):
            if delta.finish_reason == "abort":
                error = error_body("the engine has failed: its log says why", "EngineError", 500)
                await response.write(b"data: %b\n\n" % error)
                break
            await response.write(answering.event(index, delta))
        await response.write(answering.closing())
        await response.write_eof()

    async def _grow(self, answering: Answering) -> AsyncIterator[tuple[int, Delta]]:
        """Have the engine compute all choices; whoever stops listening stops the engine."""
        grown: asyncio.Queue[tuple[int, Delta]] = asyncio.Queue()
        requests = _requests(answering.asked, answering.id, grown)
        try:
            for request in requests:
                self.engine.loop.add(request)
            while not answering.ended:
                index, delta = await grown.get()
                answering.take(index, delta)
                yield index, delta
        finally:
            for request, reason in zip(requests, answering.reasons, strict=True):
                if not reason:
                    self.engine.loop.abort(request.request_id)


def _requests(asked: Asked, name: str, grown: "asyncio.Queue[tuple[int, Delta]]") -> list[Request]:
    """One for each choice, in the order of their indexes. They deliver from the engine's thread."""
    loop = asyncio.get_running_loop()

    def deliver_to(index: int) -> Callable[[Delta], None]:
        return lambda delta: _soon(loop, grown, index, delta)

    body = asked.body
    return [
        Request(
            request_id=f"{name}-{index}",
            prompt_token_ids=asked.prompts[index // asked.n],
            max_tokens=asked.max_tokens[index // asked.n],
            deliver=deliver_to(index),
            kv_transfer_params=body.kv_transfer_params,
            ignore_eos=body.ignore_eos,
            min_tokens=body.min_tokens,
            cache_salt=body.cache_salt or "",
        )
        for index in range(len(asked.prompts) * asked.n)
    ]


def _soon(loop: asyncio.AbstractEventLoop, grown: "asyncio.Queue[tuple[int, Delta]]", index: int, delta: Delta) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(grown.put_nowait, (index, delta))


def _json(body: bytes, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json")


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors in vLLM's form."""
    try:
        return await handler(request)
    except BadRequestError as error:
        return _json(error_body(str(error), error.kind, error.status), error.status)
    except web.HTTPException as error:
        return _json(error_body(error.reason, type(error).__name__, error.status), error.status)

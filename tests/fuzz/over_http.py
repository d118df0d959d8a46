"""A router's HTTP side, fed with bytes as they come off a socket. There is no bus and no engine behind it."""

import asyncio
import contextlib
import functools
import json

import structlog

from kvbus.router.service import Router
from kvbus.router.settings import RouterSettings

ANSWER_S = 0.02
"""How long an answer is waited for before our side of the connection is closed, as by a client that gives up."""
END_S = 5.0
"""Then the router must have closed it too."""
REFUSED = 400
STATUSES = frozenset((100, 200, 400, 401, 404, 405, 408, 413, 429, 431, 502, 503, 504))


@functools.cache
def _router() -> tuple[asyncio.AbstractEventLoop, Router]:
    """One for all inputs, listening, but not on any bus."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    loop = asyncio.new_event_loop()
    router = Router(RouterSettings(port=0, wait_max_s=0.1), name="router-fuzz", incarnation="1")
    loop.run_until_complete(router.server.start("127.0.0.1", 0))
    return loop, router


def http(data: bytes) -> None:
    """What looks like a request is sent as it is, anything else as the body of one. Every answer has a status that the
    router's document names, an error is OpenAI's error JSON, and no connection is left open."""
    loop, router = _router()
    sent = data if b" HTTP/1." in data[:256] else _as_body(data)
    answer = loop.run_until_complete(_exchange(router, sent))
    if answer:
        status = int(answer[9:12])
        assert answer.startswith(b"HTTP/1.") or status == REFUSED, answer[:80]
        assert status in STATUSES, answer[:400]
        head, _, body = answer.partition(b"\r\n\r\n")
        if status >= REFUSED and b"application/json" in head and not _is_cut(head, body):
            _check_error(body)


def _as_body(data: bytes) -> bytes:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    return head % len(data) + data


async def _exchange(router: Router, sent: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(router.server.host, router.server.port)
    answer = b""
    try:
        writer.write(sent)
        with contextlib.suppress(TimeoutError):
            answer = await asyncio.wait_for(reader.read(65_536), ANSWER_S)
        if writer.can_write_eof():
            writer.write_eof()
        answer += await asyncio.wait_for(reader.read(), END_S)
    except ConnectionError:
        pass  # refused in the middle of what we send
    finally:
        writer.close()
    return answer


def _is_cut(head: bytes, body: bytes) -> bool:
    """Less, or more (an answer to a second request), than the head says; or an answer to HEAD."""
    return f"content-length: {len(body)}".encode() not in head.lower()


def _check_error(body: bytes) -> None:
    said = json.loads(body)
    if "reasons" in said:  # the page /health of a router that cannot serve
        return
    error = said["error"]
    assert isinstance(error["message"], str)
    assert isinstance(error["code"], str)

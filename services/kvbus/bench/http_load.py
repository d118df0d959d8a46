"""Load on one URL from this process, and what other processes cost. Lean: what is measured is not this."""

import asyncio
import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import cast

from kvbus.errors import CommandFailed

READY_TIMEOUT_S = 40.0
READY_POLL_S = 0.05
STOP_TIMEOUT_S = 5.0
_CONTENT_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


class _Client(asyncio.Protocol):
    """One connection that sends the same request again and again."""

    def __init__(self, request: bytes, take: Callable[[], bool], latencies_s: list[float], done: Callable[[], None]):
        self._request = request
        self._take = take
        self._latencies_s = latencies_s
        self._done = done
        self._sent_at = 0.0
        self._buffer = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._next()

    def data_received(self, data: bytes) -> None:
        self._buffer = self._buffer + data if self._buffer else data
        if _complete(self._buffer):
            if not self._buffer.startswith(b"HTTP/1.1 200"):
                raise CommandFailed(f"unexpected answer: {self._buffer[:200]!r}")
            self._latencies_s.append(time.perf_counter() - self._sent_at)
            self._buffer = b""
            self._next()

    def connection_lost(self, _exc: Exception | None) -> None:
        self._done()

    def _next(self) -> None:
        assert self._transport is not None
        if not self._take():
            self._transport.close()
            return
        self._sent_at = time.perf_counter()
        self._transport.write(self._request)


def _complete(data: bytes) -> bool:
    head, separator, body = data.partition(b"\r\n\r\n")
    if not separator:
        return False
    length = _CONTENT_LENGTH.search(head)
    return len(body) >= int(length[1]) if length else body.endswith(b"0\r\n\r\n")


def request_bytes(path: str, body: bytes, headers: Sequence[str] = ()) -> bytes:
    """A POST as a client would send it."""
    lines = [f"POST {path} HTTP/1.1", "host: bench", "content-type: application/json", *headers]
    return "\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode() + body


async def drive(url: str, request: bytes, *, concurrency: int, requests: int) -> list[float]:
    """Send `request` so many times over `concurrency` connections; the latencies in seconds. Raises CommandFailed."""
    host, _, port = url.removeprefix("http://").partition(":")
    left = requests
    open_connections = concurrency
    finished = asyncio.Event()
    latencies_s: list[float] = []

    def take() -> bool:
        nonlocal left
        left -= 1
        return left >= 0

    def done() -> None:
        nonlocal open_connections
        open_connections -= 1
        if not open_connections:
            finished.set()

    loop = asyncio.get_running_loop()
    for _ in range(concurrency):
        await loop.create_connection(lambda: _Client(request, take, latencies_s, done), host, int(port))
    await finished.wait()
    if len(latencies_s) < requests:
        raise CommandFailed(f"{url} answered {len(latencies_s)} of {requests} requests")
    return latencies_s


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and all its descendants that live, in seconds."""
    parents: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(") ")[2].split()
            child = int(stat.parent.name)
            parents.setdefault(int(fields[1]), []).append(child)
            ticks[child] = int(fields[11]) + int(fields[12])
    total, todo = 0, [pid]
    while todo:
        one = todo.pop()
        total += ticks.get(one, 0)
        todo += parents.get(one, [])
    return total / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def started(
    command: Sequence[str], log: Path, environ: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process with its own group; it and its children are gone at the end."""
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603  (our own commands)
            list(command), stdout=output, stderr=output, env=os.environ | (environ or {}), start_new_session=True
        )
    try:
        yield process
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_TIMEOUT_S)
                break


def wait_ready(url: str, request: bytes, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until the request is answered with 200. Raises CommandFailed with the end of the log."""
    body = request.partition(b"\r\n\r\n")[2]
    path = request.split(b" ", 2)[1].decode()
    asked = urllib.request.Request(url + path, data=body, headers={"content-type": "application/json"})  # noqa: S310
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(asked, timeout=5) as answer:  # noqa: S310
                json.loads(answer.read())
                return
        except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError):
            time.sleep(READY_POLL_S)
    raise CommandFailed(f"not ready: {log.read_text(errors='replace')[-500:]}")

"""The console over HTTP: read-only, strict about what a browser may do, and honest when NATS is away."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from importlib import resources
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from tests.light_world import ask

from kvbus.bus import Bus, BusSettings
from kvbus.bus.link import Link
from kvbus.console.main import serve
from kvbus.console.settings import ConsoleSettings
from kvbus.embedded import EmbeddedNats
from kvbus.errors import ConfigError
from kvbus.local.fleet import FleetOptions, start_fleet
from kvbus.local.ports import free_port
from kvbus_schemas import DeadLetter, RequestServed, RouteDecided, subjects

pytestmark = pytest.mark.nats
WAIT_S = 30.0
T = "a" * 32


@contextlib.asynccontextmanager
async def console(**settings: Any) -> AsyncIterator[str]:
    """A console in this process; its URL."""
    stopping = asyncio.Event()
    given = ConsoleSettings(port=free_port(), **settings)
    running = asyncio.create_task(serve(given, stopping))
    url = f"http://127.0.0.1:{given.port}"
    try:
        async with aiohttp.ClientSession() as http, asyncio.timeout(WAIT_S):
            while True:
                with contextlib.suppress(aiohttp.ClientConnectionError):
                    await http.get(url + "/healthz")
                    break
                await asyncio.sleep(0.05)
        yield url
    finally:
        stopping.set()
        await running


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def state(http: aiohttp.ClientSession, url: str, **query: str) -> dict[str, Any]:
    """The first frame of a browser that comes now: the whole state."""
    async with http.get(url + "/events", params=query) as response:
        assert response.status == 200, await response.text()
        line = await response.content.readline()
    frame: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
    return frame


async def until(http: aiohttp.ClientSession, url: str, holds: Any) -> dict[str, Any]:
    async with asyncio.timeout(WAIT_S):
        while True:
            frame = await state(http, url)
            if holds(frame):
                break
            await asyncio.sleep(0.1)
    return frame


async def test_only_get_is_answered_and_every_answer_is_strict(nats_server: EmbeddedNats, http: Any) -> None:
    async with console(nats=nats_server.url) as url:
        await until(http, url, lambda frame: frame["bus"]["connected"])
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"):
            for path in ("/", "/events", "/api/transfer", "/metrics"):
                async with http.request(method, url + path) as response:
                    assert (response.status, response.headers["Allow"]) == (405, "GET"), (method, path)
        for path, status in (
            ("/", 200),
            ("/app.js", 200),
            ("/../settings.py", 404),
            ("/nothing", 404),
            ("/healthz", 200),
        ):
            async with http.get(url + path) as response:
                assert response.status == status, path
                policy = response.headers["Content-Security-Policy"]
                assert "default-src 'none'" in policy
                assert "unsafe" not in policy
                assert response.headers["X-Content-Type-Options"] == "nosniff"


async def test_a_page_of_elsewhere_that_calls_itself_us_is_refused(nats_server: EmbeddedNats, http: Any) -> None:
    """A name that points to 127.0.0.1 would let any web page read the bus through the browser of whoever visits it."""
    async with console(nats=nats_server.url, allowed_hosts="kvbus.example") as url:
        for name, status in (("evil.example", 403), ("kvbus.example:80", 200), ("localhost", 200), ("[::1]:8080", 200)):
            async with http.get(url + "/", headers={"Host": name}) as response:
                assert response.status == status, name


async def test_requests_that_make_no_sense_are_told_what_is_wrong(nats_server: EmbeddedNats, http: Any) -> None:
    async with console(nats=nats_server.url) as url:
        asked = {
            "/api/transfer": 400,
            "/api/transfer?id=nobody": 404,
            "/api/conversation?id=%3Cscript%3E": 404,
            "/api/find?id=nobody": 404,
            "/events?outcome=fine": 400,
            "/events?slow_ms=fast": 400,
            "/events?colour=red": 400,
        }
        for path, status in asked.items():
            async with http.get(url + path) as response:
                body = await response.json()
                assert (response.status, list(body)) == (status, ["error"]), path


async def test_more_pages_than_allowed_are_refused_and_places_come_back(nats_server: EmbeddedNats, http: Any) -> None:
    async with console(nats=nats_server.url, browsers_max=1) as url:
        async with http.get(url + "/events") as first:
            assert first.status == 200
            async with http.get(url + "/events") as second:
                assert second.status == 503
        async with asyncio.timeout(WAIT_S):
            while True:
                async with http.get(url + "/events") as again:
                    if again.status == 200:
                        break
                await asyncio.sleep(0.1)


async def test_it_starts_without_nats_says_so_and_finds_it_later(http: Any) -> None:
    server = EmbeddedNats(port=free_port())
    async with console(nats=f"nats://user:secret@{server.url.removeprefix('nats://')}", connect_timeout_s=1) as url:
        async with http.get(url + "/healthz") as response:
            told = await response.json()
            assert (response.status, told["connected"]) == (503, False)
        frame = await until(http, url, lambda frame: "start nats-server" in frame["bus"]["problem"])
        assert "secret" not in json.dumps(frame)
        with server:
            await until(http, url, lambda frame: frame["bus"]["connected"])
            async with http.get(url + "/healthz") as response:
                assert response.status == 200


async def test_the_past_is_there_at_the_start_and_what_happens_follows(bus: Bus, http: Any) -> None:
    facts: dict[str, Any] = {"request_id": "past", "mode": "local"}
    await bus.publish(RouteDecided(transfer_id=T, decode_id="d0", policy="p", reason="r", **facts), "all")
    done = RequestServed(transfer_id=T, outcome="completed", status=200, ttft_ms=5, duration_ms=9, **facts)
    await bus.publish(done, "all")
    await bus.barrier()
    async with console(nats=bus_url(bus)) as url:
        await until(http, url, lambda frame: any(row["id"] == T for row in frame["finished"]["rows"]))
        facts["request_id"] = "present"
        fresh = "b" * 32
        await bus.publish(RouteDecided(transfer_id=fresh, decode_id="d0", policy="p", reason="r", **facts), "all")
        await until(http, url, lambda frame: any(row["id"] == fresh for row in frame["running"]["rows"]))
        async with http.get(url + "/api/find", params={"id": "past"}) as response:
            assert await response.json() == {"kind": "transfer", "id": T}
        async with http.get(url + "/api/transfer", params={"id": T}) as response:
            found = await response.json()
        assert [line["type"] for line in found["lines"]] == ["RouteDecided", "RequestServed"]
        assert found["decisions"][0]["policy"] == "p"


async def test_dead_letters_and_garbage_are_counted_and_nothing_stops(bus: Bus, http: Any) -> None:
    async with console(nats=bus_url(bus)) as url:
        await until(http, url, lambda frame: frame["bus"]["connected"])
        link = await Link.open(BusSettings(nats=bus_url(bus)), "clumsy")
        await link.publish(f"{subjects.ROOT}.route.route_decided.clumsy.all.{T}", b"\xc1 no message")
        letter = DeadLetter(source="d0", subject="kvbus.v1.x", reason="<b>what is this</b>", size_bytes=3)
        await link.publish(subjects.dead_letters_of("clumsy"), msgspec.msgpack.encode(letter))
        await link.publish(subjects.dead_letters_of("clumsy"), b"\xc1")
        frame = await until(http, url, lambda frame: frame["letters"]["count"] and frame["bus"]["undecodable"])
        assert frame["letters"]["rows"][0]["reason"] == "<b>what is this</b>"
        await link.close()
        async with http.get(url + "/metrics") as response:
            text = await response.text()
        assert "kvbus_console_dead_letters_total 1.0" in text
        assert "kvbus_console_bus_connected 1.0" in text


def bus_url(bus: Bus) -> str:
    return bus._link.settings.nats


async def test_a_port_that_is_taken_is_said_before_anything_starts(nats_server: EmbeddedNats) -> None:
    async with console(nats=nats_server.url) as url:
        port = int(url.rpartition(":")[2])
        with pytest.raises(ConfigError, match="cannot listen on"):
            await serve(ConsoleSettings(nats=nats_server.url, port=port), asyncio.Event())


async def test_the_observers_key_is_enough(tmp_path: Path, http: Any) -> None:
    options = FleetOptions(engine="sim", secure=True, console=True, work_dir=tmp_path)
    async with start_fleet(options) as fleet:
        answer = await ask(http, fleet.base_url, {"prompt": "who may look? " * 20}, x_kvbus_mode="early")
        transfer = answer.headers["x-kvbus-transfer"]
        holds = lambda frame: any(row["id"] == transfer for row in frame["finished"]["rows"])  # noqa: E731
        frame = await until(http, fleet.console_url, holds)
        assert {row["id"]: row["state"] for row in frame["engines"]} == {"prefill-0": "alive", "decode-0": "alive"}
        async with http.get(fleet.console_url + "/api/transfer", params={"id": transfer}) as response:
            assert len((await response.json())["lines"]) > 5
    log = (fleet.log_dir / "console.log").read_text()
    assert "bus_denied" not in log
    assert "error" not in log


def test_the_page_asks_for_nothing_that_is_not_in_the_package() -> None:
    page = resources.files("kvbus.console") / "page"
    for entry in page.iterdir():
        text = entry.read_text(encoding="utf-8")
        assert "innerHTML" not in text
        assert "insertAdjacentHTML" not in text
        assert "https://" not in text
        for name in [part.split('"')[0] for part in text.split('from "/')[1:]]:
            assert (page / name).is_file(), name

"""The console in a real headless browser, over a light fleet that `kvbus up --console` has started."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tests.console_world import EARLY, WORDS, Page, World, browser, browser_problem, until, world

from kvbus.bus import Bus, BusSettings
from kvbus_schemas import Candidate, Message, RequestServed, RouteDecided

pytestmark = [
    pytest.mark.nats,
    pytest.mark.skipif(bool(browser_problem()), reason=browser_problem() or "there is a browser"),
]
HOSTILE = "<img src=x onerror=document.title=1>'\"&amp;"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world(tmp_path_factory.mktemp("console")) as running:
        yield running


@pytest.fixture(scope="module")
def shared(fleet: World) -> Iterator[Page]:
    with browser(fleet.console_url) as page:
        yield page


@pytest.fixture
def page(shared: Page) -> Iterator[Page]:
    """A page that is open; after each test the browser must have had nothing to complain of."""
    shared.size(1280, 800)
    shared.open()
    until(lambda: shared.text("#bus b") == "connected", "the bus")
    yield shared
    assert shared.complaints() == []


def said(fleet: World, *messages: Message) -> None:
    """Say it in the name of a router."""

    async def main() -> None:
        bus = await Bus.connect(BusSettings(nats=fleet.server.url), name="router-x", incarnation="1")
        for message in messages:
            await bus.publish(message, "all")
        await bus.barrier()
        await bus.close()

    asyncio.run(main())


def row_of(page: Page, transfer_id: str, table: str = "finished") -> str:
    """The row of that transfer."""
    return until(lambda: next(row for row in page.rows(table) if row.startswith(transfer_id[:8])), f"{table} row")


def opened(page: Page, transfer_id: str) -> None:
    row_of(page, transfer_id)
    page.click(f"#finished a[href='#t={transfer_id}']")
    until(lambda: page.text("#pane .fall"), "the waterfall")


def test_engines_are_shown_with_their_load_and_what_they_hold(page: Page) -> None:
    until(lambda: len(page.rows("engines")) == 2, "two engines")
    rows = page.rows("engines")
    assert [row.split()[0] for row in rows] == ["prefill-0", "decode-0"]
    for row, role in zip(rows, ("prefill", "decode"), strict=True):
        assert f"{role} · tiny · " in row
        assert all(word in row for word in ("alive", "running", "waiting", "of 96", "conv", "blocks"))


def test_a_request_runs_and_is_then_finished(fleet: World, page: Page) -> None:
    body = {"prompt": WORDS * 8, "max_tokens": 600, "stream": True}
    asking = threading.Thread(target=fleet.ask, args=(body,), kwargs=EARLY)
    asking.start()
    running = until(lambda: page.rows("running"), "a running transfer")
    until(lambda: any(" decode " in row for row in page.rows("running")), "its last stage")
    asking.join(timeout=60)
    transfer = running[0].split()[0]
    assert "prefill-0→decode-0" in running[0]
    row = row_of(page, transfer)
    assert "completed" in row
    assert "ms" in row
    until(lambda: page.rows("running") == [], "nothing runs")
    until(
        lambda: {"router", "matcher"} <= {word for row in page.rows("processes") for word in row.split()}, "processes"
    )


def test_a_waterfall_has_every_message_on_a_time_axis_and_marks_the_critical_path(fleet: World, page: Page) -> None:
    transfer = fleet.ask({"prompt": WORDS * 12}, **EARLY).headers["x-kvbus-transfer"]
    opened(page, transfer)
    stages, messages = page.run(
        "return ['stage', 'message'].map(c => [...document.querySelectorAll(`.fall .${c}`)].map(r => r.innerText))"
    )
    assert [name for name in ("routed", "registered", "prefill ready", "closed", "first byte") if
            not any(name in stage for stage in stages)] == []  # fmt: skip
    assert any("critical path" in stage for stage in stages)
    told = "\n".join(messages)
    assert all(word in told for word in ("push ordered", "prefill finished", "wrote", "transfer completed", "HTTP 200"))
    places = page.run("return [...document.querySelectorAll('.message .dotty')].map(i => parseFloat(i.style.left))")
    assert places == sorted(places)
    assert len(places) > 5
    widths = page.run(
        "return [...document.querySelectorAll('.stage .track i')].map(i => i.getBoundingClientRect().width)"
    )
    assert max(widths) > 50
    assert page.run("return document.activeElement.id") == "detail-title", "a reader is told what was opened"


def test_why_names_the_candidates_their_scores_and_what_was_known(fleet: World, page: Page) -> None:
    transfer = fleet.ask({"prompt": WORDS * 12}, **EARLY).headers["x-kvbus-transfer"]
    opened(page, transfer)
    page.click("#tab-why")
    until(lambda: "Policy" in page.text("#pane"), "the decision")
    pane = page.text("#pane")
    assert all(word in pane for word in ("Mode", "Reason", "Decided in", "prefill-0", "decode-0", "chosen"))


def test_a_conversation_shows_each_turn_with_what_reuse_did(fleet: World, page: Page) -> None:
    transfer = fleet.talk("two turns", 2)[-1].headers["x-kvbus-transfer"]
    opened(page, transfer)
    page.click("#tab-conversation")
    turns = until(
        lambda: page.run("return [...document.querySelectorAll('.turns li')].map(l => l.innerText)"), "the turns"
    )
    assert len(turns) == 2
    assert "miss: new" in turns[0]
    assert "keeps" in turns[0]
    assert "hit" in turns[1]
    assert "tokens taken back from decode-0" in turns[1]
    assert page.run("return document.querySelector('.turns li.here').innerText").startswith("Turn 2")


def test_what_comes_from_the_bus_is_text_and_never_markup(fleet: World, page: Page) -> None:
    transfer = "f" * 31 + "0"
    bad: dict[str, Any] = {"transfer_id": transfer, "request_id": HOSTILE, "mode": "early"}
    said(
        fleet,
        RouteDecided(
            prefill_id=HOSTILE, decode_id="d", policy=HOSTILE, reason=HOSTILE, conversation=HOSTILE,
            candidates=[Candidate(engine_id=HOSTILE, role="prefill", score=1, terms={HOSTILE: 1})], **bad,
        ),
        RequestServed(outcome="completed", status=200, error=HOSTILE, ttft_ms=5, duration_ms=9, **bad),
    )  # fmt: skip
    assert HOSTILE in row_of(page, transfer)
    opened(page, transfer)
    assert HOSTILE in page.text("#detail-summary")
    for tab, shown in (("why", "Policy"), ("conversation", "Turn 1")):
        page.click(f"#tab-{tab}")
        until(lambda shown=shown: shown in page.text("#pane"), tab)  # type: ignore[misc]
        assert HOSTILE in page.text("#pane")
    assert page.run("return document.querySelectorAll('body img').length") == 1, "only ours"
    assert page.run("return document.title") == "kvbus console"


def test_filters_and_pause_and_keys(fleet: World, page: Page) -> None:
    failed = {"transfer_id": "e" * 31 + "1", "request_id": "gone wrong", "mode": "local"}
    said(
        fleet,
        RouteDecided(decode_id="decode-0", policy="p", reason="r", **failed),  # type: ignore[arg-type]
        RequestServed(outcome="failed", status=502, duration_ms=70, error="refused", **failed),  # type: ignore[arg-type]
    )
    fleet.ask({"prompt": WORDS})
    row_of(page, failed["transfer_id"])
    choose = "const s = document.querySelector('select[name=outcome]'); s.value = arguments[0];"
    page.run(choose + "s.dispatchEvent(new Event('change', {bubbles: true}))", "failed")
    until(lambda: [row.split()[0] for row in page.rows("finished")] == ["eeeeeeee"], "only what failed")
    page.run(choose + "s.dispatchEvent(new Event('change', {bubbles: true}))", "")
    until(lambda: len(page.rows("finished")) > 1, "all")
    page.key("p")
    until(lambda: page.text("#pause").startswith("Paused"), "the pause")
    fresh = fleet.ask({"prompt": WORDS}).headers["x-kvbus-transfer"]
    until(lambda: page.run("return performance.now()") > 3000, "some frames")
    assert not any(row.startswith(fresh[:8]) for row in page.rows("finished"))
    page.key("p")
    row_of(page, fresh)
    page.key("/", *"gone w", "\ue007")
    until(lambda: "gone wrong" in page.text("#detail-summary"), "what was looked for")
    page.key("2")
    until(lambda: "Policy" in page.text("#pane"), "why, by a key")
    page.key("\ue00c")
    assert page.run("return document.getElementById('detail').hidden")


def test_a_phone_shows_it_without_scrolling_sideways(fleet: World, page: Page) -> None:
    page.size(390, 844)
    transfer = fleet.talk("phone", 2)[-1].headers["x-kvbus-transfer"]
    for colours in ("dark", "light"):
        page.colours(colours)
        page.open()
        row_of(page, transfer)
        assert page.run("return [document.documentElement.scrollWidth, innerWidth]") == [390, 390]
        opened(page, transfer)
        for tab in ("waterfall", "why", "conversation"):
            page.click(f"#tab-{tab}")
            until(lambda: len(page.text("#pane")) > 40, "the tab")
            wide = page.run("const p = document.getElementById('pane'); return [p.scrollWidth, p.clientWidth]")
            assert wide[0] <= wide[1], tab
        assert page.run("return document.documentElement.scrollWidth") == 390


def test_it_says_that_nats_is_away_and_recovers_when_it_is_back(fleet: World, page: Page) -> None:
    fleet.server.kill()
    trouble = until(lambda: page.text("#trouble"), "the trouble")
    assert "NATS is away" in trouble
    assert "kvbus doctor" in trouble
    fleet.server.start()
    until(lambda: page.text("#trouble") == "" and page.text("#bus b") == "connected", "that it is over")
    until(lambda: all("alive" in row for row in page.rows("engines")) and len(page.rows("engines")) == 2, "the engines")
    row_of(page, fleet.ask({"prompt": WORDS * 2}).headers["x-kvbus-transfer"])


def test_the_browser_asks_nobody_but_the_console(fleet: World, page: Page) -> None:
    transfer = fleet.ask({"prompt": WORDS * 2}).headers["x-kvbus-transfer"]
    opened(page, transfer)
    asked = page.asked()
    assert {f"{fleet.console_url}/{name}" for name in ("app.js", "base.css", f"api/transfer?id={transfer}")} <= asked
    assert {url for url in asked if not url.startswith(fleet.console_url + "/")} == set()

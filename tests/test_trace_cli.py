"""`kvbus trace` against a real nats-server: what was published is what is shown."""

import asyncio
import io
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest
import structlog
import typer
from rich.console import Console
from typer.testing import CliRunner, Result

from kvbus.bus import Bus, BusSettings
from kvbus.cli import trace
from kvbus.embedded import EmbeddedNats
from kvbus.errors import CommandFailed, ConfigError
from kvbus.trace.core import Line, stories_of
from kvbus.trace.reader import seconds_of
from kvbus.trace.render import show_list, show_story
from kvbus_schemas import (
    BlocksReady,
    BlocksRegistered,
    Candidate,
    LoadReported,
    Message,
    PushDone,
    RequestServed,
    RouteDecided,
    TransferClosed,
    decode,
    encode,
    subjects,
)

pytestmark = pytest.mark.nats
T, U, CONVERSATION = "a" * 32, "b" * 32, "c" * 32
TRACE_ID, SPAN_ID = "d" * 32, "e" * 16
CANDIDATES = [
    Candidate(engine_id="d0", role="decode", score=0.5),
    Candidate(engine_id="p0", role="prefill", score=1),
    Candidate(engine_id="p1", role="prefill", score=2, terms={"waiting": -1, "hit": 3}, load_age_ms=12),
]


def said() -> list[tuple[str, str, Message]]:
    """Two requests, one handed over and one failed, and a load report."""
    return [
        ("router-1", "all", RouteDecided(
            transfer_id=T, request_id="req-1", mode="early", prefill_id="p0", decode_id="d0", policy="round_robin",
            reason="next", candidates=CANDIDATES, conversation=CONVERSATION, trace_id=TRACE_ID, span_id=SPAN_ID,
        )),
        ("d0", "matcher", BlocksRegistered(
            transfer_id=T, producer_id="p0", consumer_id="d0", consumer_incarnation="1", block_ids=[[1, 2]],
            first_block=0, token_count=20, prompt_digest="f", block_size=16, lease_s=30, request_id="req-1",
        )),
        ("p0", "matcher", BlocksReady(
            transfer_id=T, producer_id="p0", block_ids=[[3, 4]], token_count=20, prompt_digest="f", lease_s=30,
            computed_ms=40,
        )),
        ("p0", "all", LoadReported(engine_id="p0", running=1, waiting=0, free_blocks=9, total_blocks=10)),
        ("p0", "d0", PushDone(
            transfer_id=T, producer_id="p0", consumer_id="d0", rank=0, ranks=1, ranges=[(0, 2)], bytes=4096,
            duration_ms=3,
        )),
        ("d0", "p0", TransferClosed(transfer_id=T, producer_id="p0", consumer_id="d0", outcome="completed")),
        ("router-1", "all", RequestServed(
            transfer_id=T, request_id="req-1", mode="early", outcome="completed", status=200, ttft_ms=55.5,
            duration_ms=55.5,
        )),
        ("router-1", "all", RouteDecided(
            transfer_id=U, request_id="req-2", mode="local", decode_id="d1", policy="round_robin", reason="only one",
        )),
        ("router-1", "all", RequestServed(
            transfer_id=U, request_id="req-2", mode="local", outcome="failed", status=502, duration_ms=900,
            error="d1 refused the connection",
        )),
    ]  # fmt: skip


async def say(url: str, messages: list[tuple[str, str, Message]]) -> None:
    buses: dict[str, Bus] = {}
    for sender, to, message in messages:
        if sender not in buses:
            buses[sender] = await Bus.connect(BusSettings(nats=url), name=sender, incarnation="1")
        await buses[sender].publish(message, to)
        await buses[sender].barrier()
    for bus in buses.values():
        await bus.close()


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedNats]:
    with EmbeddedNats() as server:
        asyncio.run(say(server.url, said()))
        yield server


Kvbus = Callable[..., Result]


@pytest.fixture
def kvbus(server: EmbeddedNats) -> Iterator[Kvbus]:
    """Runs `kvbus trace ...`."""
    app = typer.Typer()
    trace.register(app)

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(app, ["trace", *arguments, "--nats", server.url])

    yield run
    structlog.reset_defaults()  # the command has set the log to a standard error that is gone now


def objects(result: Result) -> list[dict[str, Any]]:
    assert result.exit_code == 0, result.output
    return [json.loads(text) for text in result.stdout.splitlines()]


def test_ls_lists_requests_newest_first(kvbus: Kvbus) -> None:
    head, second, first = kvbus("ls").stdout.splitlines()
    assert head.split() == ["TIME", "REQUEST", "TRANSFER", "MODE", "PREFILL", "DECODE", "OUTCOME", "TTFT", "MESSAGES"]
    assert first.split()[1:] == ["req-1", T, "early", "p0", "d0", "completed", "55.5", "ms", "6"]
    assert second.split()[1:] == ["req-2", U, "local", "-", "d1", "failed", "-", "2"]


@pytest.mark.parametrize(
    ("filters", "found"),
    [
        ([], ["req-2", "req-1"]),
        (["--engine", "p0"], ["req-1"]),
        (["--outcome", "failed"], ["req-2"]),
        (["--slow", "100"], ["req-2"]),
        (["--limit", "1"], ["req-2"]),
        (["--since", "1ms"], []),
    ],
)
def test_ls_passes_filters(kvbus: Kvbus, filters: list[str], found: list[str]) -> None:
    assert [story["request_id"] for story in objects(kvbus("ls", "--json", *filters))] == found


def test_ls_refuses_an_outcome_that_does_not_exist(kvbus: Kvbus) -> None:
    result = kvbus("ls", "--outcome", "fine")
    assert isinstance(result.exception, ConfigError)


@pytest.mark.parametrize("name", ["req-1", T, T[:6], CONVERSATION, CONVERSATION[:4]])
def test_show_finds_a_request_by_each_of_its_ids(kvbus: Kvbus, name: str) -> None:
    text = kvbus("show", name).stdout
    assert f"request req-1  transfer {T}  early  completed" in text
    assert [word for word in ("holds 2 blocks", "wrote 2 blocks, 4.0 KiB in 3.00 ms") if word not in text] == []
    assert "first byte" in text


def test_show_gives_sender_receiver_and_stages(kvbus: Kvbus) -> None:
    [story] = objects(kvbus("show", "req-1", "--json"))
    assert [(line["from"], line["to"], line["type"]) for line in story["timeline"]][1:3] == [
        ("d0", "matcher", "BlocksRegistered"),
        ("p0", "matcher", "BlocksReady"),
    ]
    assert {stage["stage"] for stage in story["stages"]} == {
        "routed", "registered", "prefill ready", "last push done", "closed", "first byte"
    }  # fmt: skip


def test_show_of_what_is_not_there_fails_and_says_what_to_do(kvbus: Kvbus) -> None:
    result = kvbus("show", "nobody")
    assert isinstance(result.exception, CommandFailed)
    assert "kvbus trace ls" in str(result.exception)


def test_show_of_an_ambiguous_beginning_names_the_choices(kvbus: Kvbus) -> None:
    result = kvbus("show", "req")
    assert isinstance(result.exception, ConfigError)
    assert "req-1, req-2" in str(result.exception)


def test_why_shows_all_candidates_best_first_and_what_was_chosen(kvbus: Kvbus) -> None:
    head, _, best, other, decode = kvbus("why", "req-1").stdout.splitlines()
    assert head == "request req-1  early p0 -> d0 (round_robin: next)"
    assert best.split() == ["prefill", "p1", "2", "12.0", "ms", "waiting", "-1,", "hit", "3"]
    assert other.split() == ["prefill", "p0", "1", "-", "chosen"]
    assert decode.split() == ["decode", "d0", "0.5", "-", "chosen"]


def test_export_jsonl_has_every_message_as_it_was(kvbus: Kvbus) -> None:
    records = objects(kvbus("export"))
    assert [record["seq"] for record in records] == sorted(record["seq"] for record in records)
    assert [record["message"]["type"] for record in records] == [type(message).__name__ for _, _, message in said()]
    assert records[1]["subject"] == f"kvbus.v1.transfer.blocks_registered.d0.matcher.{T}"
    assert len(objects(kvbus("export", "--id", "req-2"))) == 2


def test_export_perfetto_has_a_track_for_each_process_and_flows_in_pairs(kvbus: Kvbus, tmp_path: Path) -> None:
    assert kvbus("export", "--format", "perfetto", "--out", str(tmp_path / "t.json")).exit_code == 0
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    tracks = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert {"router-1", "p0", "d0", "matcher"} <= tracks
    flows = [(event["id"], event["ph"]) for event in events if event["ph"] in "sf"]
    assert len(flows) == 2 * len({number for number, _ in flows})
    pushed = next(event for event in events if event["name"] == "PushDone" and event["ph"] == "X")
    assert pushed["dur"] == 3000


def test_export_otlp_keeps_the_clients_trace(kvbus: Kvbus) -> None:
    [document] = objects(kvbus("export", "--format", "otlp"))
    spans = document["resourceSpans"][0]["scopeSpans"][0]["spans"]
    root = next(span for span in spans if span["name"] == "kvbus.request" and span["traceId"] == TRACE_ID)
    assert root["parentSpanId"] == SPAN_ID
    below = [span["name"] for span in spans if span["parentSpanId"] == root["spanId"]]
    assert {"kvbus.registered", "kvbus.first_byte"} <= set(below)
    assert all(int(span["startTimeUnixNano"]) <= int(span["endTimeUnixNano"]) for span in spans)


def test_nothing_personal_is_in_an_export(kvbus: Kvbus) -> None:
    """The only free texts of a request are its id and the errors of engines."""
    keys = {key for record in objects(kvbus("export")) for key in record["message"]}
    assert keys & {"prompt", "messages", "tokens", "token_ids", "text", "content"} == set()


def test_tail_prints_what_happens_from_now_on(server: EmbeddedNats) -> None:
    script = "import typer\nfrom kvbus.cli import trace\napp = typer.Typer()\ntrace.register(app)\napp()"
    command = [sys.executable, "-c", script, "trace", "tail", "--nats", server.url]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    late = RouteDecided(transfer_id="f" * 32, request_id="late", mode="local", decode_id="d9", policy="p", reason="r")
    load = LoadReported(engine_id="p0", running=1, waiting=0, free_blocks=9, total_blocks=10)
    assert process.stdout is not None
    printed = threading.Event()
    lines: list[str] = []

    def read(stream: IO[str]) -> None:
        for line in stream:
            lines.append(line.rstrip())
            printed.set()

    reader = threading.Thread(target=read, args=(process.stdout,))
    reader.start()
    for _ in range(40):  # what is said before it follows is not shown
        asyncio.run(say(server.url, [("p0", "all", load), ("router-9", "all", late)]))
        if printed.wait(timeout=1.0):
            break
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) == 0
    reader.join(timeout=10)
    process.stdout.close()
    assert lines
    assert all(line.endswith("ffffffffffff  router-9 -> all  local d9 (p: r)") for line in lines)


def test_on_a_terminal_it_is_a_table_and_fits() -> None:
    lines = [
        Line(n, 1_700_000_000 + n / 100, sender, to, decode(encode(message)))
        for n, (sender, to, message) in enumerate(said())
    ]
    console = Console(width=120, force_terminal=True, record=True, file=io.StringIO())
    show_list(console, stories_of(lines))
    show_story(console, stories_of(lines)[0])
    shown = console.export_text().splitlines()
    assert max(map(len, shown)) <= 120
    assert any("critical" in text for text in shown)
    assert subjects.ROOT not in "".join(shown)


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("10m", 600), ("1.5h", 5400), ("5ms", 0.005)])
def test_durations_are_read(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "10", "m", "-1s", "1w"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no duration"):
        seconds_of(text)

"""Recordings of real runs, replayed against the code of today: nothing is decided otherwise than it was then."""

import asyncio
import json
import re
import time
from collections import Counter
from pathlib import Path

import nats
import pytest
import typer
from nats.js.api import ConsumerConfig, ReplayPolicy
from typer.testing import CliRunner, Result

from kvbus.bus import Bus, BusSettings
from kvbus.cli import replay as command
from kvbus.embedded import EmbeddedNats
from kvbus.errors import CommandFailed, ConfigError
from kvbus.matcher.core import MatcherCore
from kvbus.replay import live, matcher, reuse
from kvbus.replay.compare import Outcome, report_of
from kvbus.replay.pace import Pace
from kvbus.replay.recording import Gone, Recording, read
from kvbus_schemas import (
    CancelOrdered,
    DrainOrdered,
    EngineCard,
    PushOrdered,
    RequestServed,
    ReuseAnswered,
    TransferClosed,
    encode,
    subjects,
)

HERE = Path(__file__).parent / "recordings"
RECORDINGS = sorted(HERE.glob("*.jsonl"))


def recording_of(name: str) -> Recording:
    return read((HERE / f"{name}.jsonl").read_text().splitlines())


def kvbus_replay(*arguments: str | Path) -> Result:
    app = typer.Typer()
    command.register(app)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def changed(tmp_path: Path, name: str, change: dict[str, dict[str, object] | None], kind: str) -> Path:
    """The recording with the first message of a kind changed, or (None) every copy of it left out."""
    out, first = [], ""
    for text in (HERE / f"{name}.jsonl").read_text().splitlines():
        line = json.loads(text)
        message = line.get("message") or {}
        if message.get("type") == kind and first in ("", message["transfer_id"]):
            first = message["transfer_id"]
            if change[kind] is None:
                continue
            message |= change[kind] or {}
        out.append(json.dumps(line))
    path = tmp_path / "changed.jsonl"
    path.write_text("\n".join(out))
    return path


@pytest.mark.parametrize("against", ["matcher", "reuse", "router"])
@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_a_recorded_run_replays_without_a_difference(path: Path, against: str) -> None:
    result = kvbus_replay(path, "--against", against, "--json")
    assert json.loads(result.stdout)["differences"] == []
    assert result.exit_code == 0


def test_the_recording_of_faults_has_its_faults_in_it() -> None:
    said = list(recording_of("faults").said())
    events = recording_of("faults").events
    matchers = {event.sender for event, _ in said if event.sender.startswith("matcher-")}
    repeats = Counter((event.subject, repr(message)) for event, message in said)
    outcomes = Counter(message.outcome for _, message in said if isinstance(message, RequestServed))
    lives = Counter(event.key for event in events if isinstance(event.message, EngineCard))
    assert len(matchers) == 2, "the matcher was killed and replaced"
    assert sum(count > 1 for count in repeats.values()) > 100, "messages came twice"
    assert outcomes["cancelled"] >= 3, "clients left"
    assert outcomes["retried"] >= 1, "a decode died under its requests"
    assert lives["decode-0"] >= 2, "a decode was killed and came back"
    assert any(event.message == Gone("decode-0") for event in events), "its card was gone meanwhile"
    assert {"completed", "cancelled"} <= {m.outcome for _, m in said if isinstance(m, TransferClosed)}
    assert any(isinstance(message, CancelOrdered) for _, message in said)


def test_the_recording_of_conversations_has_grants_misses_and_a_gap() -> None:
    recording = recording_of("conversations")
    answers = [message for _, message in recording.said() if isinstance(message, ReuseAnswered)]
    assert sum(answer.grant is not None for answer in answers) > 15
    assert {"new", "claimed"} <= {answer.miss for answer in answers}
    assert len({event.sender for event, _ in recording.said() if event.sender.startswith("reuse-")}) == 2


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"PushOrdered": {"block_ids": [[1, 2, 3]]}}, "changed"),
        ({"PushOrdered": {"lease_s": 7.0}}, "changed"),
        ({"PushOrdered": None}, "extra"),
        ({"BlocksRegistered": {"block_size": 99}}, "missing"),
    ],
)
def test_a_decision_that_differs_is_told_with_its_story_and_exit_code_1(
    tmp_path: Path, change: dict[str, dict[str, object] | None], kind: str
) -> None:
    path = changed(tmp_path, "load", change, next(iter(change)))
    result = kvbus_replay(path, "--against", "matcher", "--json")
    found = json.loads(result.stdout)["differences"]
    assert result.exit_code == 1
    assert kind in [difference["kind"] for difference in found]
    assert len({difference["key"] for difference in found}) == 1
    assert any("blocks for" in line["what"] for line in found[0]["story"])
    text = kvbus_replay(path, "--against", "matcher")
    assert (text.exit_code, found[0]["key"] in text.stdout) == (1, True)


def test_another_version_of_a_core_is_found_out() -> None:
    recording = recording_of("load")

    def stricter(part: Recording) -> Outcome:
        return matcher.replay(part, MatcherCore(transfers_max=1))

    report = report_of(recording, stricter(recording), stricter)
    said = Counter((difference.kind, type(difference.decision.message).__name__) for difference in report.differences)
    assert said["missing", "PushOrdered"] > 0
    assert said["extra", "BlocksUnavailable"] > 0


def test_an_answer_that_differs_from_the_recorded_one_is_found(tmp_path: Path) -> None:
    text = (HERE / "conversations.jsonl").read_text()
    path = tmp_path / "other.jsonl"
    path.write_text(text.replace('"token_count":283', '"token_count":284', 1))
    assert kvbus_replay(path, "--against", "reuse").exit_code == 1


def test_another_policy_is_told_apart_and_judged_by_a_model_that_states_its_error() -> None:
    result = kvbus_replay(HERE / "load.jsonl", "--against", "router", "--policy", "round_robin", "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 0, "that another policy chooses otherwise is no failure"
    assert 0 < len(found["differences"]) <= found["asked"]
    estimate = found["estimate"]
    assert 0 < estimate["error_share"] < 1
    assert estimate["own"]["ttft_ms_mean"] == pytest.approx(estimate["measured"]["ttft_ms_mean"], rel=0.25)
    assert estimate["other"]["prefill_balance"] == pytest.approx(1.0, abs=0.05), "turns are even"


def test_a_policy_that_sends_all_to_one_engine_is_estimated_as_worse() -> None:
    result = kvbus_replay(
        HERE / "load.jsonl", "--against", "router", "--policy", "tests.replay_policies:Crowding", "--json"
    )
    estimate = json.loads(result.stdout)["estimate"]
    assert estimate["other"]["prefill_balance"] == 2.0
    assert estimate["other"]["ttft_ms_mean"] > estimate["own"]["ttft_ms_mean"] * 1.5


@pytest.mark.parametrize(("name", "says"), [("Inventing", "not offered"), ("Raising", "no idea")])
def test_a_policy_that_fails_is_reported_and_survived(name: str, says: str) -> None:
    result = kvbus_replay(HERE / "load.jsonl", "--against", "router", "--policy", f"tests.replay_policies:{name}")
    assert result.exit_code == 0
    assert "failure 70" in result.stdout
    found = json.loads(
        kvbus_replay(
            HERE / "load.jsonl", "--against", "router", "--policy", f"tests.replay_policies:{name}", "--json"
        ).stdout
    )
    assert says in found["differences"][0]["fields"]["failure"]["replayed"]


@pytest.mark.nats
async def test_a_live_matcher_on_a_scratch_bus_decides_as_recorded() -> None:
    recording = recording_of("faults")
    outcome = await live.replay(recording, Pace("max"))
    assert len({one.key for one in outcome.replayed if isinstance(one.message, PushOrdered)}) > 20
    assert report_of(recording, outcome, matcher.replay).differences == []


@pytest.mark.nats
async def test_a_live_matcher_decides_as_recorded_at_a_multiple_of_the_speed() -> None:
    whole = recording_of("load")
    part = Recording(tuple(event for event in whole.events if event.at_s < whole.began_s + 2.0))
    outcome = await live.replay(part, Pace("2"))
    assert outcome.recorded
    assert report_of(part, outcome, matcher.replay).differences == []


@pytest.mark.nats
async def test_a_live_reuse_process_on_a_scratch_bus_answers_as_recorded() -> None:
    recording = recording_of("conversations")
    outcome = await live.replay(recording, Pace("max"), against="reuse")
    granted = [one for one in outcome.replayed if isinstance(one.message, ReuseAnswered) and one.message.grant]
    assert len(granted) > 15
    assert report_of(recording, outcome, reuse.replay).differences == []


@pytest.mark.nats
async def test_a_live_reuse_process_that_is_told_something_else_is_found_out(tmp_path: Path) -> None:
    text = (HERE / "conversations.jsonl").read_text()
    whole = read(re.sub(r'("type":"ReuseOffered".{0,2000}?"token_count":)\d+', r"\g<1>77", text).splitlines())
    part = Recording(tuple(event for event in whole.events if event.at_s < whole.began_s + 4.0))
    outcome = await live.replay(part, Pace("max"), against="reuse")
    assert any(one.kind == "changed" for one in report_of(part, outcome, reuse.replay).differences)


@pytest.mark.nats
async def test_the_streams_own_replay_keeps_the_original_timing(nats_server: EmbeddedNats) -> None:
    bus = await Bus.connect(BusSettings(nats=nats_server.url), name="timing", incarnation="i")
    for number in range(3):
        await bus.publish(DrainOrdered(engine_id="timing", reason=str(number)), "timing")
        await asyncio.sleep(0.3)
    client = await nats.connect(nats_server.url)
    config = ConsumerConfig(replay_policy=ReplayPolicy.ORIGINAL)
    heard = await client.jetstream().subscribe(
        subjects.everything_about("timing"), ordered_consumer=True, config=config
    )
    times = []
    for _ in range(3):
        await heard.next_msg(timeout=5)
        times.append(time.monotonic())
    await client.close()
    await bus.close()
    assert times[-1] - times[0] > 0.5, "as long as it took, however late a busy machine wakes us for each"


@pytest.mark.nats
async def test_a_bus_on_which_engines_live_is_no_scratch_bus() -> None:
    recording = recording_of("load")
    card = next(event.message for event in recording.events if isinstance(event.message, EngineCard))
    with EmbeddedNats() as server:
        bus = await Bus.connect(BusSettings(nats=server.url), name="someone", incarnation="i")
        await (await bus.bucket(subjects.ENGINES_BUCKET)).put(card.engine_id, encode(card), ttl_s=60)
        with pytest.raises(CommandFailed, match="needs one of its own"):
            await live.replay(recording, Pace("max"), server.url)
        await bus.close()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--against", "router", "--live"], "--live plays to a matcher or a reuse"),
        (["--against", "matcher", "--policy", "round_robin"], "--policy is for --against router"),
        (["--against", "router", "--policy", "nobodys"], "unknown policy"),
        (["--against", "matcher", "--speed", "soon"], "original, max, or a factor"),
    ],
)
def test_wrong_usage_is_told_before_anything_is_played(arguments: list[str], says: str) -> None:
    result = kvbus_replay(HERE / "load.jsonl", *arguments)
    assert isinstance(result.exception, ConfigError)
    assert says in str(result.exception)
    assert isinstance(kvbus_replay("/nowhere", "--against", "matcher").exception, ConfigError)

"""`kvbus chaos`: the schedule is a function of the seed, what is counted is counted right, a small campaign runs."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvbus.auth.setup import Access, parties_of
from kvbus.chaos.client import Answer, _take_error, _take_stream, _take_whole
from kvbus.chaos.dice import Dice
from kvbus.chaos.permissions import UnknownPermissionError, without
from kvbus.chaos.plan import DENIALS, PAUSES_S, SHARES, Fault, plan, scaled, shares_of
from kvbus.chaos.score import Crash, Happened, Outcome, clear, first_right, score, serves
from kvbus.chaos.script import Said, Script, Turn, scripts
from kvbus.presence import CARD_TTL_S

COUNTS = {"prefill": 2, "decode": 2, "matcher": 2, "reuse": 1, "router": 2}
GAP_S = (1.0, 2.0)


def fault(kind: Any = "kill", target: str = "decode-0", **more: Any) -> Fault:
    return Fault(number=1, lane="decode", kind=kind, target=target, gap_s=0.0, **more)


def outcome(**changed: Any) -> Outcome:
    given: dict[str, Any] = {
        "request_id": "r",
        "script": 0,
        "turn": 0,
        "router": "router-0",
        "sent_s": 10.0,
        "ended_s": 11.0,
        "verdict": "right",
        "prefill_id": "prefill-1",
        "decode_id": "decode-0",
        "closed": "completed",
    }
    return Outcome(**given | changed)


# The schedule.


def test_a_seed_gives_one_schedule_and_another_seed_another() -> None:
    one, again, other = (plan(seed, 200, COUNTS, GAP_S) for seed in (7, 7, 8))
    assert one == again
    assert one != other


@pytest.mark.parametrize("faults", [18, 30, 200, 2000])
def test_a_schedule_has_as_many_faults_as_were_asked_for_and_one_of_each_share(faults: int) -> None:
    lanes = plan(3, faults, COUNTS, GAP_S)
    assert sorted(fault.number for lane in lanes.values() for fault in lane) == list(range(1, faults + 1))
    assert min(scaled(SHARES, faults)) >= 1


def test_two_hundred_faults_kill_ten_of_either_engine_and_every_other_process() -> None:
    faults = [fault for lane in plan(1, 200, COUNTS, GAP_S).values() for fault in lane]
    killed = [fault.target.split("-")[0] for fault in faults if fault.kind == "kill"]
    assert min(killed.count("prefill"), killed.count("decode")) >= 10
    assert {"matcher", "reuse", "router", "nats"} <= set(killed)
    paused = {fault.target.split("-")[0] for fault in faults if fault.kind == "pause"}
    assert paused == {"prefill", "decode", "matcher", "reuse", "router", "nats"}


def test_only_the_kinds_that_were_asked_for_are_dealt() -> None:
    lanes = plan(1, 20, COUNTS, GAP_S, ("cut", "forge"))
    assert {fault.kind for lane in lanes.values() for fault in lane} == {"cut", "forge"}
    assert {share.kind for share in shares_of(())} == {share.kind for share in SHARES}


@pytest.mark.parametrize("role", ["prefill", "decode", "nats"])
def test_a_pause_is_longer_than_the_lease_of_a_card(role: str) -> None:
    assert PAUSES_S[role][0] > CARD_TTL_S


def test_one_lane_never_hurts_two_engines_of_a_role_at_once() -> None:
    for name, lane in plan(5, 400, COUNTS, GAP_S).items():
        for one in lane:
            if one.kind in ("kill", "pause") and one.target.split("-")[0] in ("prefill", "decode"):
                assert one.target.startswith(name)


def test_dice_are_even_enough_and_shuffle_keeps_everything() -> None:
    dice = Dice(1, "x")
    drawn = [dice.below(4) for _ in range(4000)]
    assert all(800 < drawn.count(number) < 1200 for number in range(4))
    items = list(range(50))
    dice.shuffle(items)
    assert sorted(items) == list(range(50)) != items


# The requests.


def test_the_next_turn_says_again_what_was_said_and_answered() -> None:
    whole = Script(0, "steady", False, [Turn([1, 2], 2), Turn([5], 1)])
    assert whole.body(1, [Said([3, 4], "")])["prompt"] == [1, 2, 3, 4, 5]
    chat = Script(0, "steady", True, [Turn("a", 2), Turn("c", 1)])
    said = [(message["role"], message["content"]) for message in chat.body(1, [Said([], "b")])["messages"]]
    assert said == [("user", "a"), ("assistant", "b"), ("user", "c")]


def test_the_steady_load_has_chats_and_completions_short_and_long_of_one_and_several_turns() -> None:
    made = [script for script in scripts(1, 80) if script.use == "steady"]
    assert {script.chat for script in made} == {True, False}
    assert {len(script.turns) for script in made} == {1, 2, 3}
    lengths = [len(script.turns[0].adds) for script in made]
    assert min(lengths) < 64
    assert max(lengths) > 500
    assert made == [script for script in scripts(1, 80) if script.use == "steady"]


# What came back.


def test_the_least_gap_between_a_token_and_the_next_best_is_found_in_both_forms_of_vllm() -> None:
    answer = Answer()
    lists = {"top_logprobs": [{"a": -0.1, "b": -2.1}, {"a": -0.5, "b": -0.75}]}
    _take_whole(answer, json.dumps({"choices": [{"text": "x", "token_ids": [7], "logprobs": lists}]}).encode())
    assert (answer.gap, answer.said, answer.code) == (0.25, Said([7], "x"), "")
    entries = {"content": [{"top_logprobs": [{"logprob": -1.0}, {"logprob": -3.0}]}]}
    message = {"message": {"content": "y"}, "token_ids": [8], "logprobs": entries}
    _take_whole(answer, json.dumps({"choices": [message]}).encode())
    assert (answer.gap, answer.said) == (2.0, Said([8], "y"))


@pytest.mark.parametrize(
    ("stream", "code", "tokens"),
    [
        (b'data: {"choices": [{"text": "a", "token_ids": [5]}]}\n\ndata: [DONE]\n\n', "", [5]),
        (b'data: {"choices": [{"text": "a", "token_ids": [5]}]}\n\n', "stream_cut_short", [5]),
        (b'data: {"choices": [{"te\n\ndata: {"error": {"code": "engine_failed", "message": "m"}}\n\n', None, []),
    ],
)
def test_a_stream_is_whole_cut_short_or_ends_with_an_error(stream: bytes, code: str | None, tokens: list[int]) -> None:
    answer = Answer()
    _take_stream(answer, stream)
    assert answer.code == ("stream_engine_failed" if code is None else code)
    assert answer.said.tokens == tokens


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"error": "no"}', b'{"error": {"message": "no code"}}'])
def test_an_error_without_openais_json_is_no_clear_one(body: bytes) -> None:
    answer = Answer(status=502)
    _take_error(answer, body)
    assert answer.code == "no_error_json"
    wrong = outcome(verdict="error", status=502, code=answer.code)
    assert not clear(wrong, [Happened(fault=fault(), began_s=0.0, ended_s=20.0)])


# What is counted.


@pytest.mark.parametrize(
    ("target", "changed", "shown"),
    [
        ("decode-0", {}, True),
        ("decode-1", {}, False),
        ("prefill-1", {}, True),
        ("prefill-1", {"closed": "failed"}, False),
        ("prefill-1", {"closed": "not needed"}, False),
        ("matcher-1", {"closed": ""}, False),
        ("reuse-0", {}, False),
        ("reuse-0", {"reuse": "hit tokens=64"}, True),
        ("router-1", {}, False),
        ("client", {"closed": ""}, True),
    ],
)
def test_what_shows_that_a_part_serves(target: str, changed: dict[str, Any], shown: bool) -> None:
    assert serves(target, outcome(**changed)) is shown


def test_a_part_has_recovered_with_the_first_right_answer_that_was_asked_for_after_the_fault() -> None:
    happened = Happened(fault=fault(), began_s=5.0, ended_s=8.0)
    early, wrong = outcome(sent_s=7.9, ended_s=9.0), outcome(verdict="error", ended_s=9.5)
    assert first_right(happened, [early, wrong]) is None
    right = first_right(happened, [early, wrong, outcome(ended_s=12.0), outcome(ended_s=11.0)])
    assert right is not None
    assert right.ended_s == 11.0


@pytest.mark.parametrize(
    ("changed", "is_clear"),
    [
        ({"status": 502, "code": "engine_failed"}, True),
        ({"status": 429, "code": "queue_full"}, True),
        ({"status": 200, "code": "stream_engine_failed"}, True),
        ({"status": 400, "code": "malformed_body"}, False),
        ({"status": 200, "code": "stream_cut_short"}, False),
        ({"status": 0, "code": "connection_refused", "router": "router-1"}, True),
        ({"status": 0, "code": "connection_refused"}, False),
        ({"status": 502, "code": "engine_failed", "sent_s": 40.0, "ended_s": 41.0}, False),
    ],
)
def test_an_error_is_clear_when_it_says_what_it_is_while_a_fault_is_felt(
    changed: dict[str, Any], is_clear: bool
) -> None:
    felt = [
        Happened(fault=fault(), began_s=5.0, ended_s=8.0, recovered_s=12.0),
        Happened(fault=fault(target="router-1"), began_s=5.0, ended_s=8.0),
    ]
    assert clear(outcome(verdict="error", **changed), felt) is is_clear


def test_everything_that_must_be_zero_is_named_when_it_is_not() -> None:
    outcomes = [outcome(verdict=verdict, code="" if verdict == "right" else "x") for verdict in ("wrong", "hang")]
    outcomes += [outcome(verdict="error", code="stream_cut_short"), outcome()]
    lost, happened = {"decode-0": 3}, [Happened(fault=fault(), began_s=1.0, ended_s=2.0)]
    crashes = [Crash("decode-1", 1.0, 1, "log")]
    counted = score(outcomes, happened, crashes, lost, forgeries_heard=1, dead_letters=5)
    assert len(counted.broken()) == 7
    assert counted.verdicts == {"wrong": 1, "hang": 1, "error": 1, "right": 1}
    good = score([outcome()], [], [], {"decode-0": 0}, forgeries_heard=0, dead_letters=5)
    assert good.broken() == []


@pytest.mark.parametrize(
    ("name", "at_s", "is_excused"),
    [("reuse-0", 6.0, True), ("reuse-0", 15.0, True), ("reuse-0", 40.0, False), ("decode-0", 15.0, False)],
)
def test_a_process_that_is_started_without_nats_may_end_and_an_engine_may_not(
    name: str, at_s: float, is_excused: bool
) -> None:
    away = Happened(fault=fault("pause", "nats"), began_s=5.0, ended_s=12.0)
    counted = score([], [away], [Crash(name, at_s, 1, "")], {}, forgeries_heard=0, dead_letters=0)
    assert (counted.starts_refused, len(counted.crashed)) == ((1, 0) if is_excused else (0, 1))


# Permissions.


def test_a_permission_is_taken_from_one_party_and_from_nobody_else(tmp_path: Path) -> None:
    access = Access(tmp_path)
    access.write(parties_of(["prefill:prefill-0", "decode:decode-0", "decode:decode-1"]))
    conf = access.conf.read_text()
    for role, subject in DENIALS:
        less = without(conf, f"{role}-0", subject)
        gone = list((Counter(conf.splitlines()) - Counter(less.splitlines())).elements())
        assert gone
        assert all(line.strip().startswith(f'"{subject}') and "decode-1" not in line for line in gone)
        assert not Counter(less.splitlines()) - Counter(conf.splitlines())
    with pytest.raises(UnknownPermissionError):
        without(conf, "decode-0", "kvbus.v1.transfer.push_ordered.")


# A campaign.


@pytest.mark.nats
def test_a_campaign_on_light_engines_ends_with_everything_right(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvbus", "chaos", "--engine", "sim", "--quick", "--seed", "4", "--faults", "8"]
    command += ["--kinds", "cut,duplicate,forge,deny", "--work-dir", str(tmp_path), "--json"]
    command += ["--report", str(tmp_path / "report.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=dict(os.environ), check=False)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    report = json.loads(done.stdout)
    assert report["bench"] == "chaos"
    counts = {name: metric["p50"] for name, metric in report["arms"][0]["metrics"].items()}
    assert counts["faults"] == 8
    assert counts["right"] > 0
    assert counts["wrong_tokens"] == counts["hangs"] == counts["blocks_lost"] == counts["processes_crashed"] == 0
    whole = json.loads((tmp_path / "report.json").read_text())
    assert sorted(one["number"] for one in whole["faults"]) == list(range(1, 9))


def test_a_campaign_of_fewer_faults_than_there_are_processes_to_hurt_is_refused() -> None:
    command = [sys.executable, "-m", "kvbus", "chaos", "--faults", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "too few" in done.stderr

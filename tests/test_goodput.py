"""Goodput by simulation: traces, costs and engines on their own, then whole runs with production's policies."""

import json
import random
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvbus.bench import goodput
from kvbus.cli.bench import bench
from kvbus.errors import ConfigError
from kvbus.goodput.cluster import Cluster, Setup
from kvbus.goodput.costs import Costs
from kvbus.goodput.engines import Decode, Job, Prefill
from kvbus.goodput.router import Beginnings
from kvbus.goodput.run import Plan, arms_of, run, verdicts
from kvbus.goodput.traces import BLOCK, Ask, hashes_of, least_work, paced, read_trace, window
from kvbus.router.policies import load

EXCERPT = Path(__file__).parent / "workloads" / "mooncake_conversation_excerpt.jsonl"
"""The first requests of Mooncake's conversation trace (kvcache-ai/Mooncake, Apache-2.0)."""


def ask(*ids: int, at_s: float = 0.0, answer: int = 10) -> Ask:
    return Ask(at_s=at_s, tokens=BLOCK * len(ids) + 1, answer=answer, ids=ids, hashes=hashes_of(ids))


def test_traces_of_three_publishers_are_read(tmp_path: Path) -> None:
    first, *rest = read_trace(EXCERPT)
    assert (first.tokens, first.answer, len(first.ids)) == (6758, 500, 13)
    assert first.hashes[0] == rest[0].hashes[0]
    assert first.hashes[1] != rest[0].hashes[1]
    azure = tmp_path / "azure.csv"
    azure.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,1374,44\n"
                     "2023-11-16 18:15:50.9951690,396,109\n")  # fmt: skip
    assert [(one.tokens, round(one.at_s, 1)) for one in read_trace(azure)] == [(1374, 0.0), (396, 4.3)]
    weka = tmp_path / "weka.jsonl"
    requests = [{"t": 0.0, "in": 1100, "out": 5, "hash_ids": list(range(18))}, {"t": 1.0, "type": "subagent"},
                {"t": 9.0, "in": 1700, "out": 5, "hash_ids": list(range(27))}]  # fmt: skip
    weka.write_text("\n".join(json.dumps({"id": name, "requests": requests}) for name in "ab"))
    asks = sorted(read_trace(weka), key=lambda one: (one.session, one.at_s))
    assert [len(one.ids) for one in asks] == [2, 3, 2, 3]
    assert asks[1].hashes[:2] == asks[0].hashes
    assert asks[2].hashes[0] != asks[0].hashes[0]  # ids are the session's own


@pytest.mark.parametrize("content", ["", "{}", "[1]", "no json"])
def test_what_is_no_trace_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "x.jsonl").write_text(content)
    with pytest.raises(ConfigError):
        read_trace(tmp_path / "x.jsonl")


def test_pace_is_a_share_of_the_least_work() -> None:
    asks = [ask(1, 2, at_s=0.0), ask(1, 2, 3, at_s=5.0)]
    busy_s = least_work(asks, float)
    assert busy_s == (2 * BLOCK + 1) + (BLOCK + 1)
    assert paced(asks, busy_s, 0.5, 2)[-1].at_s == busy_s
    assert window(asks, 1, seed=3)[0].at_s == 0.0


def test_a_prefill_computes_what_it_does_not_hold() -> None:
    costs = Costs(cache_tokens=4 * BLOCK)
    prefill = Prefill("p0", costs)
    ends = []
    for number, one in enumerate((ask(1, 2, 3), ask(1, 2, 3, 4), ask(9, 8, 7, 6), ask(1, 2, 3))):
        assert prefill.accept(Job(number, one))
        _, end_s, late = prefill.start(0.0)
        prefill.finish()
        ends.append(end_s)
        assert not late
    computed = [round((end_s - costs.prefill_base_s) * costs.prefill_tokens_per_s) for end_s in ends]
    assert computed == [3 * BLOCK + 1, BLOCK + 1, 4 * BLOCK + 1, 3 * BLOCK + 1]  # the last was driven out
    assert prefill.cache.mirror.blocks == 4


def test_what_would_be_late_is_given_up_and_a_full_queue_refuses() -> None:
    prefill = Prefill("p0", Costs(ttft_max_s=1.0, queue_max=1))
    assert prefill.accept(Job(0, ask(1)))
    assert not prefill.accept(Job(1, ask(2)))
    job, _, late = prefill.start(2.0)
    assert job is None
    assert [one.number for one in late] == [0]


def test_a_batch_grows_by_a_token_in_a_step_and_slower_when_it_is_larger() -> None:
    costs = Costs(step_base_s=1.0, step_s_per_request=1.0, step_s_per_token=0.0)
    decode = Decode("d0", costs)
    first, second = Job(0, ask(1, answer=4)), Job(1, ask(2, answer=4))
    decode.waiting += [first, second]
    assert decode.seat(0.0) == [first, second]
    decode.begin(first, 0.0)
    assert decode.next_end_s() == pytest.approx(8.0)
    decode.begin(second, 4.0)  # two steps are done
    assert decode.next_end_s() == pytest.approx(4.0 + 2 * 3.0)
    assert decode.ended(10.0) == [first]
    assert decode.next_end_s() == pytest.approx(10.0 + 2 * 2.0)


def test_a_decode_that_computes_a_prompt_itself_computes_what_it_lacks_and_holds_its_batch_up() -> None:
    costs = Costs(step_base_s=1.0, step_s_per_request=0.0, step_s_per_token=0.0)
    decode = Decode("d0", costs)
    running = Job(0, ask(1, 2, answer=4))
    decode.waiting.append(running)
    decode.seat(0.0)
    decode.begin(running, 0.0)
    decode.cache.keep(running.ask)
    assert decode.cache.hit(ask(1, 2, 3)) == 2 * BLOCK
    assert decode.delay(1.0, 5.0) == 6.0
    assert decode.delay(1.0, 1.0) == 7.0  # one prompt after the other
    assert decode.next_end_s() == pytest.approx(7.0 + 3.0)


def made_up(count: int, sessions: int, seed: int) -> list[Ask]:
    """Sessions whose prompts grow, all with the same beginning, in turn."""
    chance, grown = random.Random(seed), {number: [0, 1] for number in range(sessions)}
    asks = []
    for number in range(count):
        session = chance.randrange(sessions)
        grown[session] += [1000 * session + 10 + len(grown[session])] * chance.randrange(1, 6)
        asks.append(ask(*grown[session], at_s=float(number), answer=50))
    return asks


@pytest.mark.parametrize(
    "setup",
    [
        Setup(prefills=3, decodes=2),
        Setup(prefills=3, decodes=2, routers=4),
        Setup(prefills=3, decodes=2, restarts=(0.5,)),
        Setup(prefills=3, decodes=1, routers=2),
    ],
)
@pytest.mark.parametrize("name", ["round_robin", "session_affinity", "prefix_aware", "weighed"])
def test_every_request_ends_once_and_the_same_way_for_a_seed(setup: Setup, name: str) -> None:
    asks = made_up(70, 8, seed=1)
    prompts = [Beginnings(one) for one in asks]
    costs = Costs(decode_tokens=60_000, cache_tokens=50_000, ttft_max_s=2.0)
    moments = paced(asks, least_work(asks, costs.prefill_s), 1.2, setup.prefills)
    outcomes = [Cluster(costs, setup, lambda: load(name), seed=7).run(moments, prompts) for _ in range(2)]
    one = outcomes[0]
    assert one == outcomes[1]
    assert one.requests == 70 == one.refused + one.given_up + len(one.ttfts_s)
    assert 0 < one.good <= len(one.ttfts_s)
    assert sum(one.modes.values()) == 70


def test_nothing_of_a_cluster_is_left_behind() -> None:
    """Seats, memory and what routers think is on its way are all free at the end."""
    asks = made_up(100, 8, seed=2)
    cluster = Cluster(
        Costs(decode_tokens=30_000, ttft_max_s=1.5), Setup(prefills=2, decodes=2), lambda: load("weighed"), 1
    )
    cluster.run(paced(asks, least_work(asks, Costs().prefill_s), 1.5, 2), [Beginnings(one) for one in asks])
    for decode in cluster._decodes.values():
        assert (decode.tokens, decode.seats, len(decode.waiting), decode.batch) == (0, 0, 0, [])
    for engine in cluster._routers[0].fleet.engines.values():
        assert (engine.in_flight, engine.work_tokens) == (0, 0)


def test_the_default_beats_round_robin_and_plain_prefix_affinity_also_with_four_routers() -> None:
    """The claim of `kvbus bench goodput`, at a size that a test can afford: also with several routers and restarts."""
    asks = read_trace(EXCERPT)
    plan = Plan(requests=250, loads=(1.2,), seeds=(1, 2), policies=("round_robin", "prefix_aware", "weighed"),
                costs=Costs(ttft_max_s=2.0))  # fmt: skip
    found = run(asks, plan)
    made = verdicts(found)
    assert {verdict.setup for verdict in made} == {setup.name for setup in plan.setups}
    ratios = {(verdict.setup, verdict.rival): verdict.ratio for verdict in made}
    restarted = plan.setups[-1].name
    assert min(ratio for (setup, _), ratio in ratios.items() if setup != restarted) > 1.0, ratios
    assert min(ratios.values()) > 0.99, ratios  # a restart is half of so short a run: level within a request or two
    assert len(arms_of(found)) == 9


def test_the_command_says_what_was_run_and_what_came_of_it(tmp_path: Path) -> None:
    import typer

    from kvbus.cli.bench import register

    app = typer.Typer()
    if not bench.registered_commands:
        register(app)
    arguments = ["goodput", "--workload", str(EXCERPT), "--quick", "--requests", "60", "--seeds", "1", "--json"]
    result = CliRunner().invoke(bench, [*arguments, "--loads", "0.5"])
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["bench"] == "goodput"
    assert {"workload", "costs", "verdicts", "seeds"} <= report["conditions"].keys()
    assert report["arms"][0]["metrics"]["goodput_rps"]["n"] == 1
    with pytest.raises(ConfigError):
        goodput._loads("0,x")

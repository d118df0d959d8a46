"""All runs of one workload: loads, clusters, policies and seeds, and the figures that they come to. Pure."""

from collections.abc import Callable, Iterable
from statistics import fmean

import msgspec

from kvbus.bench.report import Arm, Metric, metric, percentile
from kvbus.goodput.cluster import Cluster, Outcome, Setup
from kvbus.goodput.costs import Costs
from kvbus.goodput.router import Beginnings
from kvbus.goodput.traces import Ask, least_work, paced, window
from kvbus.router.policies import Policy, load

DEFAULT = "weighed"
RIVALS = ("round_robin", "prefix_aware")
"""What the default has to beat (issue 5, sentence 5)."""
POLICIES = ("round_robin", "random", "least_loaded", "power_of_two", "session_affinity", "prefix_aware", DEFAULT)
SETUPS = (
    Setup(),
    Setup(name="four routers", routers=4),
    Setup(name="router restarted twice", restarts=(1 / 3, 2 / 3)),
)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to run. `loads` are shares of what the prefills could do if nothing were ever computed twice."""

    requests: int = 1500
    loads: tuple[float, ...] = (0.6, 0.9, 1.2)
    seeds: tuple[int, ...] = (1, 2, 3)
    policies: tuple[str, ...] = POLICIES
    setups: tuple[Setup, ...] = SETUPS
    costs: Costs = Costs()


QUICK = Plan(requests=500, loads=(1.1,), seeds=(1, 2, 3), policies=("round_robin", "prefix_aware", DEFAULT))

Said = Callable[[str], None]
Outcomes = dict[tuple[str, float, str], list[Outcome]]
"""By cluster, load and policy, one for each seed."""


def run(asks: list[Ask], plan: Plan, say: Said = lambda _: None) -> Outcomes:
    """Every policy meets the same requests at the same moments."""
    found: Outcomes = {}
    for seed in plan.seeds:
        chosen = window(asks, plan.requests, seed)
        prompts = [Beginnings(ask) for ask in chosen]
        busy_s = least_work(chosen, plan.costs.prefill_s)
        for setup in plan.setups:
            for share in plan.loads:
                moments = paced(chosen, busy_s, share, setup.prefills)
                for name in plan.policies:
                    cluster = Cluster(plan.costs, setup, _maker(name), seed)
                    found.setdefault((setup.name, share, name), []).append(cluster.run(moments, prompts))
        say(f"seed {seed}: {len(plan.setups) * len(plan.loads) * len(plan.policies)} runs")
    return found


def _maker(name: str) -> Callable[[], Policy]:
    return lambda: load(name)


def arms_of(found: Outcomes) -> list[Arm]:
    """One arm for each cluster, load and policy; the rounds of a metric are the seeds."""
    return [
        Arm(f"{setup}, load {share:g}, {name}", _metrics(outcomes)) for (setup, share, name), outcomes in found.items()
    ]


def _metrics(outcomes: list[Outcome]) -> dict[str, Metric]:
    return {
        "goodput_rps": metric([[one.goodput] for one in outcomes]),
        "good_percent": metric([[100 * one.good / one.requests] for one in outcomes]),
        "rejected_percent": metric([[100 * (one.refused + one.given_up) / one.requests] for one in outcomes]),
        "hit_percent": metric([[100 * one.hit_tokens / max(1, one.prompt_tokens)] for one in outcomes]),
        "ttft_s": metric([one.ttfts_s for one in outcomes]),
        "ttft_p99_s": metric([[percentile(one.ttfts_s, 0.99)] for one in outcomes if one.ttfts_s]),
        "not_early_percent": metric([[100 * (1 - one.modes.get("early", 0) / one.requests)] for one in outcomes]),
    }


class Verdict(msgspec.Struct, frozen=True):
    """The default against one rival on one cluster, over all loads and seeds."""

    setup: str
    rival: str
    ratio: float
    """Mean goodput of the default over that of the rival."""
    low: float
    high: float
    """The same of single seeds, over all loads: the least and the most."""

    @property
    def met(self) -> bool:
        return self.ratio > 1.0


def verdicts(found: Outcomes) -> list[Verdict]:
    """Whether the default beats its rivals."""
    setups = dict.fromkeys(setup for setup, _, _ in found)
    loads = dict.fromkeys(share for _, share, _ in found)
    made = []
    for setup in setups:
        for rival in RIVALS:
            pairs = [(found.get((setup, share, DEFAULT)), found.get((setup, share, rival))) for share in loads]
            kept = [(own, other) for own, other in pairs if own and other]
            if kept:
                made.append(_verdict(setup, rival, kept))
    return made


def _verdict(setup: str, rival: str, pairs: list[tuple[list[Outcome], list[Outcome]]]) -> Verdict:
    by_seed = [
        _mean(own[at] for own, _ in pairs) / max(_mean(other[at] for _, other in pairs), 1e-9)
        for at in range(len(pairs[0][0]))
    ]
    own, other = (_mean(one for pair in pairs for one in pair[side]) for side in (0, 1))
    return Verdict(setup, rival, own / max(other, 1e-9), min(by_seed), max(by_seed))


def _mean(outcomes: Iterable[Outcome]) -> float:
    return fmean(outcome.goodput for outcome in outcomes)

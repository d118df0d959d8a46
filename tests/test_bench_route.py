"""kvbus bench route: what a guest adds is told against the policy of the same round."""

from kvbus.bench import route
from kvbus.bench.report import Arm, Report
from kvbus_schemas import RouteDecided


def decided(policy: str, us: int) -> RouteDecided:
    return RouteDecided(transfer_id="t", request_id="r", mode="early", policy=policy, reason="", decided_us=us)


def test_only_what_the_guest_has_decided_counts_as_its_choice_and_is_compared_within_the_round() -> None:
    samples: route.Samples = {route.POLICY: {}, route.PYTHON_GUEST: {}}
    choices = route.Choices()
    for base_us, guest_us in ((100, 900), (200, 1200), (300, 1100)):
        choices.hear(decided("least_loaded", base_us))
        route._keep(samples, route.POLICY, 1, [1.0], {route.POLICY: choices.take()["least_loaded"]})
        choices.hear(decided(f"guest {route.PYTHON_GUEST}", guest_us))
        choices.hear(decided("least_loaded", 1))
        route._keep(samples, route.PYTHON_GUEST, 1, [3.0], choices.take())
    metrics = route._metrics(samples, route.PYTHON_GUEST)
    assert metrics["choice_ms_c1"].n == 3
    assert (metrics["added_choice_ms_c1"].p50, metrics["added_latency_ms_c1"].p50) == (0.8, 2.0)
    assert metrics["late_percent_c1"].p50 == 0.0
    outcome = Report(bench="route", arms=[Arm("guest in Python", metrics)])
    assert route.verdict(outcome).endswith("met")

"""What is counted of routers on the bus, of shadows and of the canary. Labels are names of this router's settings."""

from functools import cache

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.00025, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0)


class GuestMetrics:
    """Adds its metrics to the router's `registry`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        answers = Counter(
            "kvbus_router_guest_answers", "Answers of guests that decide, by what became of them",
            ["guest", "outcome"], registry=registry,
        )  # fmt: skip
        shadows = Counter(
            "kvbus_router_shadow_answers", "Answers of shadows, by whether they agree with the choice",
            ["guest", "outcome"], registry=registry,
        )  # fmt: skip
        decisions = Counter(
            "kvbus_router_decisions", "Dispatches, by who decided, and whether they belong to the canary's share",
            ["arm", "by"], registry=registry,
        )  # fmt: skip
        seconds = Histogram(
            "kvbus_router_guest_seconds", "Question to answer, of answers that were used",
            ["guest"], buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self.answered = cache(answers.labels)
        self.shadowed = cache(shadows.labels)
        self.decided = cache(decisions.labels)
        self.took = cache(seconds.labels)
        self._resting = Gauge(
            "kvbus_router_guest_resting", "1 while a guest is not asked, after failures in a row",
            ["guest"], registry=registry, multiprocess_mode="max",
        )  # fmt: skip
        self._share = Gauge(
            "kvbus_router_canary_share", "Share of requests that goes to the canary, 0 to 1",
            registry=registry, multiprocess_mode="max",
        )  # fmt: skip

    def rests(self, guest: str, resting: bool) -> None:
        """Whether the guest rests."""
        self._resting.labels(guest).set(resting)

    def share(self, share: float) -> None:
        """The canary's share; 0 when there is none."""
        self._share.set(share)

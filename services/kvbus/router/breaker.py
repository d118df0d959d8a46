"""When not to wait for a guest: after failures in a row it rests, then one question tries it again. Pure."""

BREAKER_FAILURES = 5
"""So many failures in a row, and the guest rests."""
BREAKER_REST_S = 5.0
"""For so long it is not asked; then one request at a time tries it, until an answer could be used."""


class Breaker:
    """The state of one guest. Every question that it admits ends in `worked`, `failed` or `undecided`."""

    def __init__(self, *, failures_max: int = BREAKER_FAILURES, rest_s: float = BREAKER_REST_S) -> None:
        self.failures = 0
        """In a row."""
        self._failures_max = failures_max
        self._rest_s = rest_s
        self._rests_until_s = 0.0
        self._trying = False

    @property
    def resting(self) -> bool:
        """True until an answer could be used again."""
        return self.failures >= self._failures_max

    def admits(self, now_s: float) -> bool:
        """Whether to ask the guest now."""
        if not self.resting:
            return True
        if self._trying or now_s < self._rests_until_s:
            return False
        self._trying = True
        return True

    def worked(self) -> bool:
        """An answer could be used. True: the guest is back from its rest."""
        was_resting, self.failures, self._trying = self.resting, 0, False
        return was_resting

    def failed(self, now_s: float) -> bool:
        """No answer, or one that could not be used. True: the guest begins to rest."""
        was_resting = self.resting
        self.failures += 1
        if not was_resting or self._trying:
            self._rests_until_s = now_s + self._rest_s
        self._trying = False
        return self.resting and not was_resting

    def undecided(self) -> None:
        """The question was withdrawn: the client has left."""
        self._trying = False

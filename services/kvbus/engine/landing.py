"""What has landed on one consumer rank: the set of (producer rank, block) that NIXL's notifications have named.

A request is reported exactly once: when its set is full, or when the scheduler concludes it. Notes may come before
the scheduler has said what to expect, in any order and twice. A core: no clock but the one it is given, no I/O.
"""

from dataclasses import dataclass, field

from kvbus.engine.facts import Expect, producer_ranks_of

EARLY_MAX = 4096
"""Transfers whose notes are kept before they are expected; the oldest go first."""
PAST_MAX = 4096
"""Ended transfers whose late notes are dropped silently."""


@dataclass
class Landing:
    expect: Expect
    missing: dict[int, set[int]]
    """By producer rank: positions of the blocks that have not landed."""


@dataclass
class Reports:
    """Requests to give back to vLLM: those that are over, and which of them failed."""

    finished: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


class LandingCore:
    """One consumer rank of `tp_size`."""

    def __init__(self, rank: int, tp_size: int) -> None:
        self.rank = rank
        self.tp_size = tp_size
        self.open: dict[str, Landing] = {}
        self.by_request: dict[str, str] = {}
        self.early: dict[str, list[tuple[int, int, int]]] = {}
        self.past: dict[str, None] = {}
        self.unexpected = 0
        self._reports = Reports()

    def expect(self, expect: Expect) -> None:
        """A request is parked for this transfer."""
        ranks = producer_ranks_of(self.rank, self.tp_size, expect.producer_tp)
        positions = range(expect.first_block, expect.first_block + expect.block_count)
        self.open[expect.transfer_id] = Landing(expect, {rank: set(positions) for rank in ranks})
        self.by_request[expect.request_id] = expect.transfer_id
        for rank, first, count in self.early.pop(expect.transfer_id, ()):
            self.landed(expect.transfer_id, rank, first, count)

    def landed(self, transfer_id: str, rank: int, first: int, count: int) -> None:
        """Blocks first to first + count - 1 from one producer rank are in place."""
        landing = self.open.get(transfer_id)
        if landing is None:
            self._keep_early(transfer_id, (rank, first, count))
            return
        missing = landing.missing.get(rank)
        if missing is None:
            self.unexpected += 1
            return
        missing.difference_update(range(first, first + count))
        if not any(landing.missing.values()):
            self._report(landing, failed=False)

    def conclude(self, request_id: str, *, failed: bool) -> None:
        """The scheduler gives the request back, whatever has landed."""
        transfer_id = self.by_request.get(request_id)
        if transfer_id is not None:
            self._report(self.open[transfer_id], failed=failed)

    def has_reports(self) -> bool:
        """Whether the next step has something to report."""
        return bool(self._reports.finished)

    def take_reports(self) -> Reports:
        """What to report in this step; each request once."""
        reports, self._reports = self._reports, Reports()
        return reports

    def waiting(self) -> bool:
        """Whether anything is expected."""
        return bool(self.open)

    def is_open(self, transfer_id: str) -> bool:
        return transfer_id in self.open

    def _report(self, landing: Landing, *, failed: bool) -> None:
        request_id = landing.expect.request_id
        del self.open[landing.expect.transfer_id]
        del self.by_request[request_id]
        self.past[landing.expect.transfer_id] = None
        if len(self.past) > PAST_MAX:
            del self.past[next(iter(self.past))]
        self._reports.finished.add(request_id)
        if failed:
            self._reports.failed.add(request_id)

    def _keep_early(self, transfer_id: str, note: tuple[int, int, int]) -> None:
        if transfer_id in self.past:
            return
        self.early.setdefault(transfer_id, []).append(note)
        if len(self.early) > EARLY_MAX:
            del self.early[next(iter(self.early))]
            self.unexpected += 1

"""The simulator's world with conversations: the rules hold, what was found stays fixed, a rule taken out is missed."""

from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from kvbus.engine import reuse_side
from kvbus.engine.retention import Freed, Reason, Retention
from kvbus.engine.reuse_side import ReuseSide
from kvbus.reuse.core import Found, Verdict
from kvbus.reuse.record import encode
from kvbus.reuse.store import Store
from kvbus.sim.hunt import Hunt, faults_of, hunt
from kvbus.sim.run import ALL_FAULTS
from kvbus.sim.talk_run import run_talk_seed


def runs(first: int, count: int, faults: frozenset[str] = ALL_FAULTS) -> Hunt:
    *_, total = hunt("kvbus", faults, first=first, runs=count, seconds=0, jobs=1, world="reuse")
    return total


def test_without_faults_conversations_are_served_and_taken_back() -> None:
    total = runs(0, 60, frozenset())
    assert total.found == {}
    assert {what for what in total.counts if what.startswith("client")} == {"client served"}
    assert total.counts["turn hit"] > 50
    assert total.counts["given back"] > 50


def test_the_rules_hold_for_conversations_whatever_happens() -> None:
    total = runs(0, 200)
    assert total.found == {}
    for what in ("turn hit", "given back", "recomputed", "preempted", "client left", "closed failed"):
        assert total.counts[what] > 0, f"no run came to {what}: the world has become too kind"


@pytest.mark.parametrize("kind", sorted(ALL_FAULTS))
def test_the_rules_hold_for_conversations_under_each_kind_of_fault(kind: str) -> None:
    assert runs(10_000, 10, frozenset({kind})).found == {}


def test_a_seed_with_conversations_is_the_same_run_every_time() -> None:
    assert run_talk_seed(12, tell=True).story == run_talk_seed(12, tell=True).story


# Each seed breaks a rule again when its fix is taken out.
FOUND_WITH_REUSE = {
    "an_idle_holder_did_not_read_an_order_and_prefill_waited_in_vain": (45, "memory,delay,duplicate"),
    "a_holder_that_had_served_a_transfer_answered_the_repeated_order_with_unavailable": (5, "duplicate"),
    "a_holder_whose_consumer_died_without_a_word_never_gave_its_blocks_back": (50_051, "crash,loss"),
    "a_claimed_offer_was_stored_again_out_of_the_stream_after_its_bucket_in_memory_was_lost": (260, "nats,reuse"),
    "a_claimed_offer_was_granted_again_from_memory_after_its_bucket_was_lost": (422, "all"),
    "a_claimed_offer_was_granted_again_by_who_had_heard_of_it_a_second_late": (7_264_161, "all"),
}


@pytest.mark.parametrize("name", FOUND_WITH_REUSE)
def test_what_was_found_with_reuse_stays_fixed(name: str) -> None:
    seed, faults = FOUND_WITH_REUSE[name]
    assert run_talk_seed(seed, faults_of(faults)).violations == []


def everything_in_common(
    conversation: str, chain: Sequence[bytes], token_count: int, block_size: int, tokens: Sequence[int]
) -> int:
    return min(token_count, len(tokens))


def quiet_when_one_rank_is(self: ReuseSide, transfer_ids: Counter[str]) -> None:
    for transfer_id in transfer_ids:
        self.wanted_until_s.pop(transfer_id, None)
        self._give_back(self.retention.quiet(transfer_id))


_let_go = Retention._let_go


def yields_while_it_serves(self: Retention, offer_id: str, reason: Reason | None, *, served: bool = False) -> Freed:
    return _let_go(self, offer_id, reason, served=True)


async def claimed_without_comparing(self: Store, key: str, found: Found | None, verdict: Verdict) -> None:
    if verdict.write is not None:
        await self._bucket.put(key, encode(verdict.write), ttl_s=verdict.write.lifetime_s)


REUSE_RULES: list[tuple[object, str, Callable[..., object], str, int]] = [
    (reuse_side, "tokens_in_common", everything_in_common, "none", 50),
    (ReuseSide, "quiet", quiet_when_one_rank_is, "write", 200),
    (Retention, "_let_go", yields_while_it_serves, "all", 300),
    (Store, "_carry_out", claimed_without_comparing, "all", 300),
]


@pytest.mark.parametrize(
    ("owner", "name", "broken", "faults", "within"), REUSE_RULES, ids=[rule[2].__name__ for rule in REUSE_RULES]
)
def test_a_rule_of_reuse_that_is_taken_out_is_missed(
    owner: object, name: str, broken: Callable[..., object], faults: str, within: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, broken)
    kinds = faults_of(faults)
    assert any(run_talk_seed(seed, kinds).violations for seed in range(within))

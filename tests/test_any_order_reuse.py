"""Any order, any duplication, same end: the core that judges offers, and the core that keeps their blocks."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvbus.engine.retention import Freed, Retention
from kvbus.reuse.core import Found, Rules, Verdict, judge_ask, judge_offer, judge_withdrawal
from kvbus_schemas import ReuseAsked, ReuseOffered, ReuseReleased, ReuseWithdrawn

KEY = "c" * 32
RULES = Rules()
TTL_S = 480.0
LISTS = settings(max_examples=200, deadline=None)
MACHINES = settings(max_examples=80, stateful_step_count=40, deadline=None)


def offer(engine_id: str, seq: int, tokens: int = 100) -> ReuseOffered:
    return ReuseOffered(
        conversation=KEY, offer_id=f"{engine_id}-{seq}", offer_seq=seq, engine_id=engine_id, source=engine_id,
        incarnation="i1", block_count=7, block_size=16, token_count=tokens, chain=[], remaining_s=TTL_S,
    )  # fmt: skip


class Key:
    """The one key of the bucket, and what was said about it."""

    def __init__(self) -> None:
        self.found: Found | None = None
        self.written_s = self.now_s = 0.0
        self.granted: list[str] = []
        self.released: list[str] = []

    def take(self, verdict: Verdict) -> None:
        if verdict.write is not None:
            self.found, self.written_s = Found(verdict.write, 1, 0.0), self.now_s
        elif verdict.delete:
            self.found = None
        for post in verdict.posts:
            assert isinstance(post.message, ReuseReleased)
            self.released.append(post.message.offer_id)
        if verdict.answer is not None and verdict.answer.grant is not None:
            self.granted.append(verdict.answer.grant.offer_id)

    def read(self) -> Found | None:
        if self.found is None or self.found.record is None:
            return None
        record = self.found.record
        left_s = record.lifetime_s + record.slack_s - (self.now_s - self.written_s)
        return Found(record, 1, left_s) if left_s > 0 else None

    def offered(self, message: ReuseOffered, age_s: float = 0.0) -> None:
        self.take(judge_offer(message, self.read(), RULES, standing="live", old_is_live=True, age_s=age_s))

    def asked(self) -> None:
        question = ReuseAsked(conversation=KEY)
        verdict = judge_ask(question, self.read(), RULES, standing="live", transfer_id="7" * 32, if_missing="new")
        self.take(verdict)

    def withdrawn(self, message: ReuseOffered) -> None:
        gone = ReuseWithdrawn(
            conversation=KEY, offer_id=message.offer_id, engine_id=message.engine_id, reason="evicted", incarnation="i1"
        )
        self.take(judge_withdrawal(gone, self.read()))


class ReuseInAnyOrder(RuleBasedStateMachine):
    """Two engines offer, withdraw and repeat; a router claims; time passes."""

    def __init__(self) -> None:
        super().__init__()
        self.key = Key()
        self.said: dict[str, tuple[ReuseOffered, float]] = {}

    @rule(engine_id=st.sampled_from(["d0", "d1"]), tokens=st.sampled_from([10, 100]))
    def a_turn_ends(self, engine_id: str, tokens: int) -> None:
        seq = 1 + sum(message.engine_id == engine_id for message, _ in self.said.values())
        message = offer(engine_id, seq, tokens)
        self.said[message.offer_id] = (message, self.key.now_s)

    @rule(data=st.data())
    def an_offer_arrives(self, data: st.DataObject) -> None:
        if self.said:
            message, said_s = data.draw(st.sampled_from(list(self.said.values())))
            self.key.offered(message, self.key.now_s - said_s)

    @rule(data=st.data())
    def a_withdrawal_arrives(self, data: st.DataObject) -> None:
        if self.said:
            self.key.withdrawn(data.draw(st.sampled_from(list(self.said.values())))[0])

    @rule()
    def a_router_claims(self) -> None:
        self.key.asked()

    @rule(seconds=st.sampled_from([0.5, 5.0, 300.0]))
    def time_passes(self, seconds: float) -> None:
        self.key.now_s += seconds

    @invariant()
    def an_offer_is_granted_at_most_once(self) -> None:
        assert max(Counter(self.key.granted).values(), default=0) <= 1

    @invariant()
    def what_was_granted_is_never_given_back_by_the_reuse_process_too(self) -> None:
        assert not set(self.key.granted) & set(self.key.released)

    @invariant()
    def no_offer_outlives_its_end(self) -> None:
        found = self.key.read()
        if found is not None and found.record is not None and found.is_held:
            _, said_s = self.said[found.record.offer_id]
            assert self.key.now_s + found.left_s <= said_s + TTL_S + 0.001


TestReuseInAnyOrder = ReuseInAnyOrder.TestCase
TestReuseInAnyOrder.settings = MACHINES
OFFERS = [offer("d0", seq) for seq in range(1, 6)]


@given(st.permutations(OFFERS), st.lists(st.sampled_from(OFFERS), max_size=10))
@LISTS
def test_whatever_the_order_of_its_offers_a_conversation_ends_with_the_newest(
    order: list[ReuseOffered], repeats: list[ReuseOffered]
) -> None:
    key = Key()
    for message in [*order[:3], *repeats, *order[3:]]:
        key.offered(message)
    found = key.read()
    assert found is not None and found.record is not None and found.is_held  # noqa: PT018
    assert found.record.offer_id == "d0-5"
    assert max(Counter(key.released).values(), default=0) <= 1


class RetentionInAnyOrder(RuleBasedStateMachine):
    """A pool of blocks, of which the core holds references; each that it took comes back once."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = Retention("d0", "i1", block_size=4, ttl_s=TTL_S, blocks_max=8)
        self.now_s = 0.0
        self.given: Counter[int] = Counter()
        self.back: Counter[int] = Counter()
        self.offers: list[str] = []

    def take(self, freed: Freed) -> None:
        self.back.update(freed.block_ids)
        self.offers += [post.message.offer_id for post in freed.posts if isinstance(post.message, ReuseOffered)]

    @rule(conversation=st.sampled_from("ab"), blocks=st.sets(st.integers(0, 11), min_size=1, max_size=9))
    def a_turn_ends(self, conversation: str, blocks: set[int]) -> None:
        self.given.update(blocks)
        self.take(self.kept.keep(conversation, list(range(4 * len(blocks))), sorted(blocks), self.now_s))

    @rule(data=st.data(), transfer_id=st.sampled_from("tuv"))
    def an_order_arrives(self, data: st.DataObject, transfer_id: str) -> None:
        if self.offers and transfer_id not in self.kept.serving:
            self.kept.order(data.draw(st.sampled_from(self.offers)), transfer_id, 4, self.now_s)

    @rule(transfer_id=st.sampled_from("tuv"))
    def the_ranks_are_quiet(self, transfer_id: str) -> None:
        self.take(self.kept.quiet(transfer_id))

    @rule(data=st.data())
    def a_release_arrives(self, data: st.DataObject) -> None:
        if self.offers:
            self.take(self.kept.release(data.draw(st.sampled_from(self.offers))))

    @rule()
    def memory_is_short(self) -> None:
        self.take(self.kept.evict_oldest())

    @rule(seconds=st.sampled_from([1.0, 200.0, 500.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        self.take(self.kept.tick(self.now_s))

    @invariant()
    def every_reference_is_held_or_has_come_back_once(self) -> None:
        held = Counter(block for offer in self.kept.offers.values() for block in offer.block_ids)
        assert self.given == held + self.back
        assert self.kept.blocks == len(held) <= 8

    @invariant()
    def what_is_being_written_is_held(self) -> None:
        assert set(self.kept.serving.values()) <= set(self.kept.offers)

    def teardown(self) -> None:
        for transfer_id in list(self.kept.serving):
            self.take(self.kept.quiet(transfer_id))
        self.take(self.kept.tick(self.now_s + TTL_S))
        assert self.given == self.back, "everything comes back in the end"


TestRetentionInAnyOrder = RetentionInAnyOrder.TestCase
TestRetentionInAnyOrder.settings = MACHINES

"""The router's view of prefix caches: what it holds exact, when it says that it does not, and how it recovers."""

import random
from typing import Any

import msgspec
import pytest

from kvbus.engine.cache_events import CacheEvent, CacheMirror, ends_of
from kvbus.router.cache_heads import Head, Heads, TokenSize
from kvbus.router.cache_index import ASK_EVERY_S, CacheIndex
from kvbus.router.cache_prompt import PROMPT_BYTES_MAX, Prompt, prompt_of, step_at
from kvbus_schemas import BlocksRemoved, BlocksStored, CacheAsked, CacheCleared, Message, Post, PromptHashed

SECRET = b"a secret of routers"
A, B, C = b"a" * 8, b"b" * 8, b"c" * 8


def stored(seq: int, *names: bytes, engine: str = "p0", incarnation: str = "i") -> BlocksStored:
    return BlocksStored(
        engine_id=engine, incarnation=incarnation, event_seq=seq, block_hashes=list(names), block_size=16
    )


def removed(seq: int, *names: bytes) -> BlocksRemoved:
    return BlocksRemoved(engine_id="p0", incarnation="i", event_seq=seq, block_hashes=list(names))


def cleared(seq: int, **fields: Any) -> CacheCleared:
    return CacheCleared(engine_id="p0", incarnation="i", event_seq=seq, **fields)


def index_of(*news: Any, blocks_max: int = 1000) -> CacheIndex:
    index = CacheIndex(blocks_max)
    index.follow({"p0": "i", "p1": "i"})
    for one in news:
        index.receive(one)
    return index


def test_an_engine_is_exact_from_its_first_word_on() -> None:
    index = index_of(stored(1, A, B), removed(2, A))
    assert index.held("p0") == {B}
    assert (index.state("p0"), index.state("p1"), index.state("p9")) == ("exact", "degraded", None)


def test_repeats_and_what_is_older_change_nothing() -> None:
    index = index_of(stored(1, A), stored(2, B), removed(3, A), stored(1, A), stored(3, C))
    assert index.held("p0") == {B}
    assert index.state("p0") == "exact"
    assert index.facts()["p0"].gaps == 0


def test_a_gap_degrades_and_a_restatement_recovers() -> None:
    index = index_of(stored(1, A), stored(3, C))
    assert (index.state("p0"), index.facts()["p0"].gaps) == ("degraded", 1)
    assert index.held("p0") == {A, C}  # still used: most of it is right
    index.receive(cleared(4, restates=True, block_count=2))
    assert index.state("p0") == "degraded"
    index.receive(stored(5, B, C))
    assert index.state("p0") == "exact"
    assert index.held("p0") == {B, C}
    assert index.facts()["p0"].recoveries == 1


def test_a_restatement_that_loses_a_part_does_not_recover() -> None:
    index = index_of(stored(1, A), stored(3, C), cleared(4, restates=True, block_count=2), stored(6, C))
    assert index.state("p0") == "degraded"


def test_an_exact_index_ignores_a_restatement_for_others() -> None:
    index = index_of(stored(1, A, B), cleared(2, restates=True, block_count=2))
    assert index.held("p0") == {A, B}
    index.receive(stored(3, A, B))
    assert index.state("p0") == "exact"
    assert index.held("p0") == {A, B}


def test_a_cache_that_was_cleared_is_known_whatever_was_missed() -> None:
    index = index_of(stored(1, A), stored(3, C), cleared(4))
    assert (index.state("p0"), index.held("p0")) == ("exact", frozenset())


def test_who_is_not_exact_is_asked_now_and_then_until_it_is() -> None:
    index = index_of(stored(1, A), stored(3, C))
    assert [(post.to, type(post.message)) for post in index.due(0.0)] == [("p0", CacheAsked), ("p1", CacheAsked)]
    assert index.due(ASK_EVERY_S / 2) == []
    index.receive(cleared(4, restates=True))
    assert [post.to for post in index.due(ASK_EVERY_S)] == ["p1"]


def test_a_lost_connection_puts_everything_in_doubt() -> None:
    index = index_of(stored(1, A))
    index.doubt()
    assert index.state("p0") == "degraded"
    index.receive(stored(2, B))
    assert index.state("p0") == "degraded"


def test_with_an_incarnation_goes_all_that_it_held() -> None:
    index = index_of(stored(1, A))
    index.follow({"p0": "j", "p1": "i"})
    assert (index.held("p0"), index.state("p0"), index.blocks) == (frozenset(), "degraded", 0)
    index.receive(stored(2, B))  # a late word of the old one
    assert (index.held("p0"), index.ignored) == (frozenset(), 1)
    index.receive(stored(1, C, incarnation="j"))
    assert index.state("p0") == "exact"
    assert index.held("p0") == {C}


def test_an_engine_that_left_frees_its_place() -> None:
    index = index_of(stored(1, A), stored(1, A, B, engine="p1"))
    index.follow({"p1": "i", "p2": "i"})
    assert index.hits([Head(A, 16), Head(B, 32)]) == {"p1": 32}
    index.receive(stored(1, A, engine="p2"))
    assert index.hits([Head(A, 16), Head(B, 32)]) == {"p1": 32, "p2": 16}


def test_the_index_is_bounded_and_says_so() -> None:
    index = index_of(stored(1, A, B, C), blocks_max=2)
    assert (index.blocks, index.state("p0")) == (2, "degraded")
    assert [post.to for post in index.due(0.0)] == ["p1"]  # to ask would bring the same again


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_lost_or_repeated_the_index_is_the_cache_once_it_is_exact(seed: int) -> None:
    """Engine's mirror and router's index over a bus that loses, repeats and delays."""
    chance, truth = random.Random(seed), set[int]()
    mirror, index = CacheMirror("p0", 16), CacheIndex(10_000)
    index.follow({"p0": ""})
    now_s, checked = 0.0, 0

    def deliver(posts: list[Post]) -> None:
        for post in posts:
            for _ in range(chance.choice((0, 1, 1, 1, 1, 1, 2))):
                assert isinstance(post.message, BlocksStored | BlocksRemoved | CacheCleared)
                index.receive(post.message)

    for _ in range(300):
        now_s += 1.0
        deliver(mirror.receive([_change(chance, truth)]))
        for post in index.due(now_s):
            assert post.to == "p0"
            deliver(mirror.restate())
        if index.state("p0") == "exact":
            checked += 1
            assert index.held("p0") == {mirror.name_of(name) for name in truth} or _behind(index, mirror)
    assert checked > 20


def _behind(index: CacheIndex, mirror: CacheMirror) -> bool:
    """The newest messages are lost and nothing has come after them: no router can know yet."""
    return index.facts()["p0"].blocks >= 0 and index.seq("p0") < mirror.seq


def _change(chance: random.Random, truth: set[int]) -> CacheEvent:
    kind = chance.choice(
        ("stored", "stored", "removed", "cleared") if chance.random() < 0.05 else ("stored", "removed")
    )
    if kind == "cleared":
        truth.clear()
        return CacheEvent("cleared")
    names = [chance.randrange(1, 60) for _ in range(3)]
    if kind == "stored":
        truth.update(names)
        return CacheEvent("stored", names)
    truth.difference_update(names)
    return CacheEvent("removed", names)


# Prompts


def body(**members: Any) -> dict[str, msgspec.Raw]:
    return {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in members.items()}


def made(text: str, **more: Any) -> Prompt:
    found = prompt_of(body(prompt=text, **more), "m", SECRET)
    assert found is not None
    return found


def test_prompts_that_begin_alike_have_the_same_marks_up_to_the_difference() -> None:
    one, two = made("x" * 5000 + "a" * 5000), made("x" * 5000 + "b" * 5000)
    same = [first for first, second in zip(one.marks(), two.marks(), strict=True) if first == second]
    assert same == [mark for mark in one.marks() if mark[1] <= 5001]
    assert one.head == two.head


@pytest.mark.parametrize("more", [{"tools": [1]}, {"cache_salt": "s"}, {"chat_template": "t"}])
def test_what_goes_before_a_prompt_is_part_of_it(more: dict[str, Any]) -> None:
    assert made("x" * 1000, **more).head != made("x" * 1000).head


def test_the_next_turn_of_a_chat_begins_like_the_turn_before() -> None:
    messages = [{"role": "user", "content": "tell me " * 300}]
    later = [*messages, {"role": "assistant", "content": "no " * 300}, {"role": "user", "content": "why"}]
    first, second = (prompt_of(body(messages=turn), "m", SECRET) for turn in (messages, later))
    assert first is not None
    assert second is not None
    assert list(first.marks()) == list(second.marks())[: len(list(first.marks()))]


def test_marks_are_keyed_and_few() -> None:
    other = prompt_of(body(prompt="x" * 1000), "m", b"another secret")
    assert other is not None
    assert other.head != made("x" * 1000).head
    assert len(list(made("x" * 400_000).marks())) < 80
    assert max(end for _, end in made("x" * (2 * PROMPT_BYTES_MAX)).marks()) <= PROMPT_BYTES_MAX
    assert step_at(0) == 256


def test_no_prompt_is_no_prompt() -> None:
    assert prompt_of({}, "m", SECRET) is None
    assert prompt_of(body(prompt="x"), "m", b"") is None


def hashed(tokens: int, *, first: int = 0, block_size: int = 16) -> PromptHashed:
    """A prompt whose blocks are numbered from `first` on."""
    ends = ends_of(tokens // block_size)
    names = [(first + end).to_bytes(8, "big") for end in ends]
    return PromptHashed(
        engine_id="p0", transfer_id="t", token_count=tokens, block_size=block_size, ends=ends, block_hashes=names
    )


def test_a_learned_prompt_is_known_up_to_its_end_and_no_further() -> None:
    heads = Heads(1000)
    assert heads.known(made("x" * 8000)) == []
    heads.learn(made("x" * 8000), hashed(2000))
    assert [head.tokens for head in heads.known(made("x" * 8000))][-1] == pytest.approx(2000, rel=0.15)
    assert heads.known(made("x" * 4000 + "y" * 4000))[-1].tokens == pytest.approx(1000, rel=0.15)


def test_token_ids_are_counted_and_not_guessed() -> None:
    ids = prompt_of(body(prompt=[1] * 1000 + [123456] * 1000), "m", SECRET)
    assert ids is not None
    assert ids.is_ids
    heads = Heads(1000)
    heads.learn(ids, hashed(2000))
    for head, (_, end) in zip(heads.known(ids), ids.marks(), strict=True):
        exact = ids.text[:end].count(b",")
        assert exact * 14 // 16 - 16 <= head.tokens <= exact


def test_a_name_that_another_prompt_agrees_on_stays() -> None:
    heads = Heads(1000)
    heads.learn(made("x" * 4000 + "a" * 4000), hashed(2000))
    before = heads.known(made("x" * 3800))
    told = heads.learn(made("x" * 4000 + "b" * 40_000), hashed(11_000))
    assert heads.known(made("x" * 3800)) == before
    assert told is not None
    assert not {head.name for head in before} & set(told.block_hashes)


def test_what_one_router_has_learned_another_knows() -> None:
    one, two = Heads(1000), Heads(1000)
    mapped = one.learn(made("x" * 8000), hashed(2000))
    assert mapped is not None
    two.told(mapped)
    assert two.known(made("x" * 8000)) == one.known(made("x" * 8000)) != []
    assert one.learn(made("x" * 8000), hashed(2000)) is None or one.known(made("x" * 8000))[-1].name


def test_the_oldest_beginnings_go_first() -> None:
    heads = Heads(50)
    for number in range(10):
        heads.learn(made(f"{number}" * 4000), hashed(1000))
    assert len(heads) <= 50
    assert heads.known(made("0" * 4000)) == []
    assert heads.known(made("9" * 4000)) != []


def test_the_size_of_a_token_is_learned() -> None:
    size = TokenSize(4.0)
    assert size.tokens(400) == 100
    size.learn(1000, 1000)
    assert size.tokens(400) == 400


def test_hits_are_the_longest_beginning_of_each_engine() -> None:
    index = index_of(stored(1, A, B), stored(1, A, engine="p1"))
    heads = [Head(b"", 0), Head(A, 16), Head(B, 32), Head(C, 48)]
    assert index.hits(heads) == {"p0": 32, "p1": 16}
    assert index.hits([]) == {}


def test_every_message_of_the_plane_has_its_place() -> None:
    kinds: list[Message] = [stored(1, A), cleared(2), CacheAsked(engine_id="p0")]
    assert {message.key for message in kinds} == {"p0"}
    assert hashed(100).key == "t"

"""The conversations whose blocks decode keeps: what counts against the room, who goes first, who is never let go."""

from kvbus.engine.retention import Retention
from kvbus_schemas import ReuseOffered, ReuseWithdrawn

BLOCK_SIZE = 4


def retention(blocks_max: int = 8) -> Retention:
    return Retention("decode-0", "i1", block_size=BLOCK_SIZE, ttl_s=480.0, blocks_max=blocks_max)


def tokens(blocks: int) -> list[int]:
    return list(range(blocks * BLOCK_SIZE))


def offer_of(kept: Retention, conversation: str) -> str:
    return kept.by_conversation[conversation]


def test_blocks_that_conversations_share_count_once() -> None:
    kept = retention()
    for number, own in enumerate((3, 4, 5)):
        freed = kept.keep(f"c{number}", tokens(4), [0, 1, 2, own + 10], 0.0)
        assert [type(post.message) for post in freed.posts] == [ReuseOffered]
    assert (kept.blocks, len(kept.offers)) == (6, 3)
    assert kept.release(offer_of(kept, "c0")).block_ids == [0, 1, 2, 13]
    assert kept.blocks == 5
    for conversation in ("c1", "c2"):
        kept.release(offer_of(kept, conversation))
    assert kept.blocks == 0


def test_the_oldest_go_until_there_is_room_for_what_is_new_and_it_is_said() -> None:
    kept = retention(blocks_max=6)
    kept.keep("old", tokens(3), [1, 2, 3], 0.0)
    kept.keep("younger", tokens(3), [4, 5, 6], 1.0)
    freed = kept.keep("new", tokens(2), [7, 8], 2.0)
    withdrawn = [post.message for post in freed.posts if isinstance(post.message, ReuseWithdrawn)]
    assert [(message.conversation, message.reason) for message in withdrawn] == [("old", "evicted")]
    assert (freed.block_ids, sorted(kept.by_conversation), kept.blocks) == ([1, 2, 3], ["new", "younger"], 5)


def test_an_offer_larger_than_the_room_is_not_kept_and_costs_nobody_his() -> None:
    kept = retention(blocks_max=4)
    kept.keep("small", tokens(2), [1, 2], 0.0)
    freed = kept.keep("large", tokens(5), [3, 4, 5, 6, 7], 1.0)
    assert (freed.posts, freed.block_ids, list(kept.by_conversation)) == ([], [3, 4, 5, 6, 7], ["small"])


def test_what_is_being_written_to_somebody_outlives_its_lifetime_and_any_shortage() -> None:
    kept = retention(blocks_max=4)
    kept.keep("taken", tokens(4), [1, 2, 3, 4], 0.0)
    assert kept.order(offer_of(kept, "taken"), "t1", 16, 1.0) is not None
    assert kept.tick(1000.0).block_ids == []
    assert kept.keep("other", tokens(2), [5, 6], 1000.0).block_ids == [5, 6]
    assert kept.quiet("t1").block_ids == [1, 2, 3, 4]
    assert kept.blocks == 0


def test_an_expired_offer_is_given_to_nobody() -> None:
    kept = retention()
    kept.keep("c", tokens(2), [1, 2], 0.0)
    assert kept.order(offer_of(kept, "c"), "t1", 8, 480.0) is None
    withdrawn = kept.tick(480.0)
    assert withdrawn.block_ids == [1, 2]

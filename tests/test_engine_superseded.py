"""The offer of a conversation's last turn, once the next turn has left a newer one."""

from kvbus.engine.retention import SUPERSEDED_S, Retention


def kept_twice(blocks_max: int = 8) -> tuple[Retention, str]:
    """A conversation with two turns, and the first one's offer."""
    kept = Retention("d0", "i1", block_size=4, ttl_s=480.0, blocks_max=blocks_max)
    kept.keep("c", list(range(8)), [1, 2], 0.0)
    older = kept.by_conversation["c"]
    assert kept.keep("c", list(range(12)), [1, 2, 3], 10.0).block_ids == []
    return kept, older


def test_a_turn_may_end_before_its_prefill_has_ordered_what_was_claimed_for_it() -> None:
    kept, older = kept_twice()
    held = kept.order(older, "t", 8, 10.5)
    assert held is not None
    assert held.block_ids == [1, 2]
    assert kept.tick(10.0 + SUPERSEDED_S).block_ids == []
    assert kept.quiet("t").block_ids == [1, 2]
    assert kept.by_conversation["c"] != older


def test_it_goes_soon_without_a_word() -> None:
    kept, older = kept_twice()
    assert not kept.due(10.9)
    assert kept.due(10.0 + SUPERSEDED_S)
    freed = kept.tick(10.0 + SUPERSEDED_S)
    assert (freed.block_ids, freed.posts) == ([1, 2], [])  # who claimed it, or kept its record, knows of the newer one
    assert kept.order(older, "t", 8, 12.0) is None
    assert (kept.blocks, len(kept.offers)) == (3, 1)


def test_it_goes_first_when_memory_is_short() -> None:
    kept, older = kept_twice(blocks_max=5)
    freed = kept.keep("other", list(range(12)), [4, 5, 6], 10.1)
    assert older not in kept.offers
    assert freed.block_ids[:2] == [1, 2]


def test_what_is_too_large_to_be_kept_supersedes_nothing() -> None:
    kept = Retention("d0", "i1", block_size=4, ttl_s=480.0, blocks_max=2)
    kept.keep("c", list(range(8)), [1, 2], 0.0)
    assert kept.keep("c", list(range(12)), [1, 2, 3], 10.0).block_ids == [1, 2, 3]
    assert kept.tick(100.0).block_ids == []
    assert kept.order(kept.by_conversation["c"], "t", 8, 100.0) is not None

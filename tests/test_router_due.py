"""Whether an offer is on its way, as far as a router knows."""

from kvbus.router.due import DUE_MAX, DUE_S, Due


def test_a_conversation_is_asked_for_again_only_for_a_moment_after_its_turn() -> None:
    due = Due()
    assert not due.expects("c", 0.0)
    due.ended("c", 0.0)
    assert due.expects("c", DUE_S)
    assert not due.expects("c", DUE_S + 0.001)
    assert not due.expects("other", 0.0)


def test_once_a_turn_has_the_offer_nobody_else_waits_for_it() -> None:
    due = Due()
    due.ended("c", 1.0)
    due.taken("c")
    due.taken("c")
    assert not due.expects("c", 1.0)


def test_only_so_many_are_remembered_and_none_for_longer_than_it_counts() -> None:
    due = Due()
    for number in range(DUE_MAX + 1):
        due.ended(str(number), 1.0)
    assert not due.expects("0", 1.0)
    assert due.expects("1", 1.0)
    due.ended("late", 1.5)
    assert not due.expects("1", 1.0)
    assert due.expects("late", 1.5)

"""When watched keys end: reckoned by one clock, whatever the other says."""

import math

import pytest

from kvbus.bus.expiry import LOOK_AGAIN_S, Expiry, lifetime_s


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


SERVER_S = 1_800_000_000.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def expiry(clock: Clock) -> Expiry:
    expiry = Expiry(clock)
    expiry.set_clock(SERVER_S)
    return expiry


def test_a_key_ends_its_lifetime_after_it_was_stored(expiry: Expiry, clock: Clock) -> None:
    expiry.keep("old", 6.0, stored_unix_s=SERVER_S - 4)
    expiry.keep("new", 6.0, stored_unix_s=SERVER_S)
    assert expiry.next_s() == pytest.approx(clock.now_s + 2)
    assert expiry.due(clock.now_s + 1.9) == []
    assert expiry.due(clock.now_s + 2.1) == ["old"]


def test_a_stamp_of_the_future_gives_no_more_than_the_lifetime_and_one_of_the_past_no_less_than_now(
    expiry: Expiry, clock: Clock
) -> None:
    expiry.keep("k", 6.0, stored_unix_s=SERVER_S + 3600)
    assert expiry.next_s() == pytest.approx(clock.now_s + 6)
    expiry.keep("k", 6.0, stored_unix_s=SERVER_S - 3600)
    assert expiry.next_s() == pytest.approx(clock.now_s)


def test_a_renewal_moves_the_end(expiry: Expiry, clock: Clock) -> None:
    expiry.keep("k", 6.0, stored_unix_s=SERVER_S)
    clock.now_s += 4
    expiry.keep("k", 6.0, stored_unix_s=SERVER_S + 4)
    assert expiry.due(clock.now_s + 5.9) == []


def test_what_is_due_is_due_again_a_little_later_until_it_is_forgotten(expiry: Expiry, clock: Clock) -> None:
    expiry.keep("k", 1.0, stored_unix_s=SERVER_S)
    clock.now_s += 2
    assert expiry.due(clock.now_s) == ["k"]
    assert expiry.due(clock.now_s) == []
    assert expiry.due(clock.now_s + LOOK_AGAIN_S) == ["k"]
    expiry.forget("k")
    assert expiry.next_s() == math.inf


@pytest.mark.parametrize(("text", "seconds"), [("480", 480), ("1h", 3600), ("1500ms", 1.5), ("1m30s", 90)])
def test_lifetimes_are_read_as_nats_writes_them(text: str, seconds: float) -> None:
    assert lifetime_s({"Nats-TTL": text}) == seconds


def test_without_a_lifetime_there_is_none() -> None:
    assert lifetime_s({}) is None
    assert lifetime_s({"Nats-TTL": "never"}) is None

"""The parts of a matcher process: its lease, the engines' cards, its partition, its settings."""

from typing import Any

import pytest
from msgspec.structs import replace

from kvbus.bus import Bus
from kvbus.errors import ConfigError
from kvbus.matcher.lease import Lease
from kvbus.matcher.partition import Partition
from kvbus.matcher.settings import MatcherSettings
from kvbus.presence import Cards
from kvbus_schemas import BlocksReady, CancelOrdered, EngineCard, subjects

T = "a" * 32
READY = BlocksReady(
    transfer_id=T, producer_id="p0", block_ids=[[1, 2]], token_count=20, prompt_digest="f00d", lease_s=30.0
)


@pytest.mark.nats
async def test_of_two_that_want_a_lease_one_holds_it_and_stops_before_the_other_starts(bus: Bus) -> None:
    bucket = await bus.bucket(subjects.LEASES_BUCKET)
    one, two = Lease(bucket, "test", "one"), Lease(bucket, "test", "two")
    await one.step(100.0)
    await two.step(100.1)
    assert (one.is_held(100.2), two.is_held(100.2)) == (True, False)
    await two.step(102.4)
    assert (one.is_held(102.24), one.is_held(102.25), two.is_held(102.5)) == (True, False, False)
    await two.step(102.7)
    assert two.is_held(102.8)
    await one.step(102.8)
    assert not one.is_held(102.8)
    await two.give_up()
    await one.step(103.0)
    assert one.is_held(103.1)


def test_a_card_that_vanished_with_its_server_is_gone_only_after_its_lease() -> None:
    cards = Cards()
    for name in ("p0", "d0"):
        cards.seen(EngineCard(
            engine_id=name, incarnation="1", role="decode", model="m", http_url="", block_size=1, num_blocks=1
        ))  # fmt: skip
    cards.reconnected(10.0)
    cards.vanished("p0", 10.1)
    cards.vanished("d0", 10.1)
    cards.seen(EngineCard(
        engine_id="d0", incarnation="1", role="decode", model="m", http_url="", block_size=1, num_blocks=1
    ))  # fmt: skip
    assert cards.gone(15.9) == []
    assert cards.gone(16.0) == [("p0", "1")]
    cards.vanished("d0", 20.0)
    cards.vanished("stranger", 20.0)
    assert cards.gone(20.0) == [("d0", "1")]


def test_every_producer_belongs_to_exactly_one_partition() -> None:
    parts = [Partition.parse(f"{index}/3") for index in range(3)]
    for number in range(50):
        assert sum(part.owns(replace(READY, producer_id=f"p{number}")) for part in parts) == 1
    assert all(part.owns(CancelOrdered(transfer_id=T, reason="r")) for part in parts)
    assert [part.lease_key for part in (Partition(), *parts[:1])] == ["matcher", "matcher-0-3"]


@pytest.mark.parametrize("changes", [{"partition": "4/4"}, {"partition": "x"}, {"transfers_max": 0}])
def test_settings_that_cannot_work_stop_the_start(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        MatcherSettings(**changes).checked()

"""`kvbus up --secure`: everything runs with keys of its own, and nobody is denied anything that it needs."""

from pathlib import Path

import aiohttp
import pytest
from tests.light_world import ask

from kvbus.bus import Bus, BusSettings
from kvbus.errors import BusError, ConfigError
from kvbus.local.fleet import Fleet, FleetOptions, start_fleet
from kvbus_schemas import AnyMessage, PushDone, ReuseAsked, subjects

pytestmark = pytest.mark.nats
TEXT = "a conversation of some length that is worth keeping " * 40


async def test_a_secured_fleet_hands_over_and_reuses_with_nobody_denied(tmp_path: Path) -> None:
    options = FleetOptions(engine="sim", secure=True, work_dir=tmp_path)
    async with start_fleet(options) as fleet, aiohttp.ClientSession() as http:
        heard: list[AnyMessage] = []
        directory = fleet.access.directory
        assert directory is not None
        seed_file = str(directory / "observer.nk")
        observer = await Bus.connect(
            BusSettings(nats=fleet.nats_url, nkey_seed_file=seed_file), name="observer", incarnation="1"
        )
        await observer.subscribe(subjects.everything(), heard.append)
        for turn in range(2):
            answer = await ask(http, fleet.base_url, {"prompt": TEXT * (turn + 1), "conversation_id": "c"})
            assert answer.headers["x-kvbus-mode"] == "early"
        await observer.close()
        with pytest.raises(BusError, match="authorization violation"):
            await Bus.connect(BusSettings(nats=fleet.nats_url, connect_timeout_s=2), name="x", incarnation="1")
    sources = {type(message): message.source for message in heard}
    assert sources[PushDone] == "prefill-0-r0"
    assert sources[ReuseAsked] == "router-0"
    assert {"matcher-0", "decode-0", "prefill-0"} <= {message.source for message in heard}
    for log in fleet.log_dir.glob("*.log"):
        assert "bus_denied" not in log.read_text(), log
        assert "dead_letter" not in log.read_text(), log


def test_somebody_elses_nats_is_not_secured(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kvbus auth init"):
        Fleet(FleetOptions(engine="sim", secure=True, nats="nats://h:4222", work_dir=tmp_path), lambda text: None)

"""Settings: flag, then environment, then file, then default; what is unknown stops the start."""

from pathlib import Path

import msgspec
import pytest

from kvbus.bus import BusSettings
from kvbus.errors import ConfigError
from kvbus.settings import load


class RouterSettings(BusSettings, frozen=True, forbid_unknown_fields=True):
    port: int = 8000
    handoff_ttl_s: float = 60.0
    policy: str = "round_robin"


FILE = """
nats = "nats://from-file:4222"
[router]
port = 7001
handoff_ttl_s = 7.5
policy = "from_file"
[matcher]
unknown_to_the_router = 1
"""


@pytest.fixture
def file_env(tmp_path: Path) -> dict[str, str]:
    path = tmp_path / "kvbus.toml"
    path.write_text(FILE)
    return {"KVBUS_CONFIG": str(path)}


def test_without_anything_given_the_defaults_hold() -> None:
    assert load(RouterSettings, "router", environ={}) == RouterSettings()


def test_a_flag_beats_the_environment_which_beats_the_file(file_env: dict[str, str]) -> None:
    environ = file_env | {"KVBUS_ROUTER_PORT": "7002", "KVBUS_ROUTER_HANDOFF_TTL_S": "8"}
    settings = load(RouterSettings, "router", {"port": 7003, "policy": None}, environ)
    assert (settings.port, settings.handoff_ttl_s, settings.policy) == (7003, 8.0, "from_file")


def test_what_all_processes_share_needs_no_section_and_the_section_is_nearer(file_env: dict[str, str]) -> None:
    assert load(RouterSettings, "router", environ=file_env).nats == "nats://from-file:4222"
    shared = file_env | {"KVBUS_NATS": "nats://shared:4222"}
    assert load(RouterSettings, "router", environ=shared).nats == "nats://shared:4222"
    nearer = shared | {"KVBUS_ROUTER_NATS": "nats://router:4222"}
    assert load(RouterSettings, "router", environ=nearer).nats == "nats://router:4222"


@pytest.mark.parametrize(("environ", "flags"), [({"KVBUS_ROUTER_HANDOF_TTL_S": "1"}, {}), ({}, {"handof_ttl_s": 1})])
def test_a_typo_stops_the_start_and_names_the_nearest_setting(
    environ: dict[str, str], flags: dict[str, object]
) -> None:
    with pytest.raises(ConfigError, match="'handof_ttl_s' of router: did you mean 'handoff_ttl_s'"):
        load(RouterSettings, "router", flags, environ)


def test_a_setting_unlike_any_other_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"known are .*policy, port"):
        load(RouterSettings, "router", environ={"KVBUS_ROUTER_XYZZY": "1"})


def test_a_value_that_does_not_fit_is_named_with_its_place() -> None:
    with pytest.raises(ConfigError, match=r"router: .*int.*\$\.port"):
        load(RouterSettings, "router", environ={"KVBUS_ROUTER_PORT": "many"})


@pytest.mark.parametrize("content", [None, "port = "])
def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "kvbus.toml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match="cannot read KVBUS_CONFIG="):
        load(RouterSettings, "router", environ={"KVBUS_CONFIG": str(path)})


def test_settings_cannot_be_changed_after_they_were_read() -> None:
    with pytest.raises(AttributeError):
        BusSettings().nats = "other"  # type: ignore[misc]
    assert msgspec.structs.fields(BusSettings)[0].name == "nats"

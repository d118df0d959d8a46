"""`kvbus reuse` and its settings: one environment serves all processes, and a typo stops the start."""

import pytest
from typer.testing import CliRunner

from kvbus.cli.reuse import own_environ
from kvbus.errors import ConfigError
from kvbus.reuse.settings import ReuseSettings
from kvbus.settings import load


def loaded(**environ: str) -> ReuseSettings:
    return load(ReuseSettings, "reuse", {}, own_environ(environ)).checked()


def test_what_is_meant_for_routers_and_engines_does_not_stop_the_reuse_process() -> None:
    settings = loaded(KVBUS_REUSE_SECRET="s" * 32, KVBUS_REUSE_TTL_S="480", KVBUS_REUSE_MIN_TOKENS="32")
    assert settings.min_tokens == 32


def test_an_unknown_setting_names_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match="min_tokens"):
        loaded(KVBUS_REUSE_MIN_TOKEN="32")


@pytest.mark.parametrize(
    ("name", "value"),
    [("STORAGE", "disk"), ("LANES", "0"), ("REPLICAS", "-1"), ("MIN_TOKENS", "-1"), ("LIFETIME_MAX_S", "nan")],
)
def test_a_value_that_cannot_work_is_refused(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name.lower() if name != "STORAGE" else "reuse"):
        loaded(**{f"KVBUS_REUSE_{name}": value})


def test_the_command_shows_its_help() -> None:
    import typer

    from kvbus.cli import reuse

    app = typer.Typer()
    reuse.register(app)
    assert "--min-tokens" in CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200", "NO_COLOR": "1"}).output

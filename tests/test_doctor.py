"""`kvbus doctor` says what is wrong and what to do, and its exit code tells a script."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from kvbus import doctor
from kvbus.cli import doctor as command
from kvbus.embedded import EmbeddedNats


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> typer.Typer:
    """The command alone, with NIXL's own 2 s start left to the engines' tests."""
    monkeypatch.setattr(doctor, "check_nixl", lambda: doctor.Check("NIXL", "ok", "left out"))
    monkeypatch.delenv("KVBUS_NATS", raising=False)
    app = typer.Typer()
    app.callback()(lambda: None)
    command.register(app)
    return app


@pytest.mark.nats
def test_a_good_server_passes_and_is_left_as_it_was(app: typer.Typer, nats_server: EmbeddedNats) -> None:
    result = CliRunner().invoke(app, ["doctor", "--nats", nats_server.url, "--json"])
    report = json.loads(result.stdout.splitlines()[-1])
    found = {check["name"]: check["verdict"] for check in report["checks"]}
    assert {name: found[name] for name in ("NATS", "nats-server version", "JetStream", "bucket")} == {
        "NATS": "ok",
        "nats-server version": "ok",
        "JetStream": "ok",
        "bucket": "ok",
    }
    assert not (nats_server.log_file.parent / "jetstream" / "$G" / "streams" / "KV_kvbus_doctor").exists()


@pytest.mark.nats
def test_without_a_url_it_starts_a_server_of_its_own(app: typer.Typer) -> None:
    result = CliRunner().invoke(app, ["doctor"])
    assert "ok    JetStream" in result.stdout


def test_an_unreachable_server_fails_with_what_to_do(app: typer.Typer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBUS_NATS_SERVER", "/unused")
    result = CliRunner().invoke(app, ["doctor", "--nats", "nats://127.0.0.1:1"])
    assert result.exit_code == 1
    assert "fail  NATS: no connection to NATS at nats://127.0.0.1:1" in result.stdout
    assert "-> start `nats-server -js`" in result.stdout


@pytest.mark.nats
def test_a_server_without_jetstream_fails(app: typer.Typer, tmp_path: Path) -> None:
    config = tmp_path / "accounts.conf"
    config.write_text("accounts { PLAIN { users = [{user: a, password: b}] } }\nno_auth_user: a\n")
    with EmbeddedNats(config_file=config) as server:
        result = CliRunner().invoke(app, ["doctor", "--nats", server.url])
    assert result.exit_code == 1
    assert "fail  JetStream" in result.stdout


@pytest.mark.parametrize(
    ("version", "verdict"),
    [
        ("2.10.29", "fail"),
        ("2.11.0", "ok"),
        ("v2.15.1", "ok"),
        ("", "fail"),
    ],
)
def test_servers_that_never_expire_keys_fail(version: str, verdict: str) -> None:
    assert doctor.check_server_version(version).verdict == verdict


@pytest.mark.parametrize(
    ("installed", "verdict"),
    [
        (None, "warn"),
        ("0.32.0+cpu", "ok"),
        ("0.32.5", "ok"),
        ("0.33.0", "fail"),
        ("0.3.2", "fail"),
    ],
)
def test_only_the_supported_vllm_passes(monkeypatch: pytest.MonkeyPatch, installed: str | None, verdict: str) -> None:
    monkeypatch.setattr(doctor, "_installed", lambda package: installed)
    assert doctor.check_vllm().verdict == verdict


def test_an_old_or_missing_package_fails_with_the_command_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.check_package("msgspec", (0, 19)).verdict == "ok"
    monkeypatch.setattr(doctor, "_installed", lambda package: "0.9.1")
    assert doctor.check_package("msgspec", (0, 19)).advice == "pip install -U 'msgspec>=0.19'"
    monkeypatch.setattr(doctor, "_installed", lambda package: None)
    assert doctor.check_package("msgspec", (0, 19)).advice == "pip install 'msgspec>=0.19'"


def test_a_nixl_that_crashes_takes_only_its_own_process_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_installed", lambda package: "1.5.1")
    monkeypatch.setattr(doctor, "_NIXL_PROBE", "import os; os.abort()")
    check = doctor.check_nixl()
    assert (check.verdict, check.found) == ("fail", "exit code -6")

"""compose/secure.yaml: every service of compose.yaml has a key of its own, which the command in its head makes."""

import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.compose_world import COMPOSE, load
from tests.test_auth_setup import kvbus_auth

from kvbus.embedded import find_binary

SECURE = COMPOSE / "secure.yaml"
SERVERS = {"nats", "provision"}
OFF_THE_BUS = {"prometheus", "grafana"}


@pytest.fixture(scope="module")
def services() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load(SECURE.read_text())["services"]
    return found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the command in the head of the file makes."""
    directory = tmp_path_factory.mktemp("compose") / "auth"
    line = next(line for line in SECURE.read_text().splitlines() if "kvbus auth init" in line)
    words = shlex.split(line.lstrip("# "))[2:]
    words[words.index("compose/auth")] = str(directory)
    done = kvbus_auth(*words)
    assert done.exit_code == 0, done.output
    return directory


def test_every_service_has_a_key(services: dict[str, dict[str, Any]]) -> None:
    assert set(services) - {"provision"} == set(load()) - OFF_THE_BUS


def test_a_service_sees_its_own_seed_only_under_the_name_of_its_environment(
    services: dict[str, dict[str, Any]], made: Path
) -> None:
    for name in set(services) - SERVERS:
        environment = made / Path(services[name]["env_file"]).name
        given = dict(line.split("=", 1) for line in environment.read_text().splitlines())
        (mount,) = services[name]["volumes"]
        inside = mount.split(":")[1]
        assert given["KVBUS_NKEY_SEED_FILE"] == inside
        assert (made / Path(inside).name).exists()
        flags = [word for word in load()[name]["command"] if word.startswith("--engine-id=")]
        assert flags in ([], [f"--engine-id={given['KVBUS_NAME']}"])


def test_nats_server_takes_both_files_together(made: Path, tmp_path: Path) -> None:
    for file in (COMPOSE / "nats.conf", COMPOSE / "nats-secure.conf", made / "nats-auth.conf"):
        shutil.copy(file, tmp_path)
    command = [find_binary(), "-t", "-c", str(tmp_path / "nats-secure.conf")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

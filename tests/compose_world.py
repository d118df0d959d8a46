"""compose.yaml as local processes: the very commands, environments and health checks, with hosts and ports mapped."""

import asyncio
import os
import re
import sys
import time
from collections.abc import Mapping
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from kvbus.embedded import find_binary
from kvbus.local.children import Child
from kvbus.local.ports import free_port

ROOT = Path(__file__).parent.parent
COMPOSE = ROOT / "compose"
PROFILES = ("vllm", "light")
_VARIABLE = re.compile(r"\$\{(\w+):-([^}]*)\}")
_URL = re.compile(r"http://[^'\" ]+")


def interpolated(value: Any, environ: Mapping[str, str]) -> Any:
    """`value` with every ${NAME:-default} replaced, as docker compose does it."""
    if isinstance(value, dict):
        return {key: interpolated(item, environ) for key, item in value.items()}
    if isinstance(value, list):
        return [interpolated(item, environ) for item in value]
    if isinstance(value, str):
        return _VARIABLE.sub(lambda found: environ.get(found[1]) or found[2], value)
    return value


def load(environ: Mapping[str, str] | None = None) -> dict[str, dict[str, Any]]:
    """The services by name."""
    document = yaml.safe_load((COMPOSE / "compose.yaml").read_text())
    services: dict[str, dict[str, Any]] = interpolated(document["services"], environ or {})
    return services


def of_profile(profile: str) -> dict[str, dict[str, Any]]:
    """The services that `--profile profile` starts, each only with the dependencies that are started too."""
    chosen = {name: s for name, s in load().items() if profile in s.get("profiles", [profile])}
    for service in chosen.values():
        service["depends_on"] = {name: how for name, how in service.get("depends_on", {}).items() if name in chosen}
    return chosen


def start_order(services: dict[str, dict[str, Any]]) -> list[list[str]]:
    """What is started together, each after those that it depends on. Raises CycleError."""
    sorter = TopologicalSorter({name: service["depends_on"].keys() for name, service in services.items()})
    sorter.prepare()
    order = []
    while sorter.is_active():
        order.append(sorted(sorter.get_ready()))
        sorter.done(*order[-1])
    return order


def environment_of(service: dict[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in service.get("environment", {}).items()}


def health_url(service: dict[str, Any]) -> str:
    """The URL that the service's health check asks for."""
    found = _URL.search(" ".join(service["healthcheck"]["test"]))
    assert found, service["healthcheck"]
    return found[0]


def seconds(duration: str) -> float:
    """A duration such as `60s`."""
    assert duration.endswith("s"), duration
    return float(duration.removesuffix("s"))


class Stack:
    """All services of one profile as child processes. `async with` it: inside, all are healthy."""

    def __init__(self, profile: str, work_dir: Path, model: Path | None = None) -> None:
        self.services = of_profile(profile)
        self.work_dir, self.model = work_dir, model
        self.children: list[tuple[str, Child]] = []
        self.ports = {name: self._ports(service) for name, service in self.services.items()}
        self.exit_codes: dict[str, int | None] = {}

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.ports['router'][8000]}"

    async def __aenter__(self) -> "Stack":
        try:
            for names in start_order(self.services):
                await asyncio.gather(*(self._start(name, self.services[name]) for name in names))
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """In the reverse order, each within its grace period."""
        while self.children:
            name, child = self.children.pop()
            await child.stop(seconds(self.services[name]["stop_grace_period"]))
            self.exit_codes[child.name] = child.exit_code

    def child(self, name: str) -> Child:
        return next(child for _, child in self.children if child.name == name)

    async def _start(self, name: str, service: dict[str, Any]) -> None:
        """Every replica, and wait until all are healthy."""
        for number in range(service.get("deploy", {}).get("replicas", 1)):
            own = self.ports[name] if number == 0 else self._ports(service)
            mapped = {key: self._local(value, own) for key, value in environment_of(service).items()}
            command = [*self._program(service), *(self._local(part, own) for part in self._arguments(service, own))]
            child = Child(f"{name}-{number}", command, self.work_dir, _outer_environment() | mapped)
            self.children.append((name, child))
            await self._until_healthy(child, service, own)

    async def _until_healthy(self, child: Child, service: dict[str, Any], own: dict[int, int]) -> None:
        deadline_s = time.monotonic() + seconds(service["healthcheck"]["start_period"])
        check = [self._local(part, own) for part in service["healthcheck"]["test"][1:]]
        program = {"python": sys.executable}.get(check[0], check[0])
        while True:
            child.check()
            process = await asyncio.create_subprocess_exec(program, *check[1:], stderr=asyncio.subprocess.DEVNULL)
            if await process.wait() == 0:
                return
            assert time.monotonic() < deadline_s, f"{child.name} is not healthy: {child.log_tail()}"
            await asyncio.sleep(0.2)

    def _program(self, service: dict[str, Any]) -> list[str]:
        """The image's entry point. That of the official nats image runs its command."""
        return [] if service["image"].startswith("nats:") else [sys.executable, "-m", "kvbus"]

    def _arguments(self, service: dict[str, Any], own: dict[int, int]) -> list[str]:
        command: list[str] = service["command"]
        if command[0] != "nats-server":
            return command
        config = self.work_dir / "nats.conf"
        text = (
            (COMPOSE / "nats.conf").read_text().replace('"0.0.0.0:', '"127.0.0.1:').replace("/data", str(self.work_dir))
        )
        for port, local in own.items():
            text = text.replace(f":{port}", f":{local}")
        config.write_text(text)
        return [find_binary(), "-c", str(config)]

    def _ports(self, service: dict[str, Any]) -> dict[int, int]:
        """Ports inside the container, and those that stand for them here."""
        published = [int(entry.rsplit(":", 1)[1]) for entry in service.get("ports", [])]
        return {port: free_port() for port in {*published, *map(int, service.get("expose", []))}}

    def _local(self, text: str, own: dict[int, int]) -> str:
        """What `text` means on this machine, for a service with ports `own`."""
        for name, ports in self.ports.items():
            for port, local in ports.items():
                text = text.replace(f"//{name}:{port}", f"//127.0.0.1:{local}")
        for port, local in own.items():
            text = re.sub(rf"(^|=|//127\.0\.0\.1:){port}\b", rf"\g<1>{local}", text)
        if self.model is not None:
            text = text.replace("/models/tiny", str(self.model))
        return {"0.0.0.0": "127.0.0.1", "eth0": "lo"}.get(text, text.replace("=0.0.0.0", "=127.0.0.1"))


def _outer_environment() -> dict[str, str]:
    """This process's environment without any setting of kvbus: a container has none but its own."""
    return {name: value for name, value in os.environ.items() if not name.startswith("KVBUS_")}


def host_of(url: str) -> tuple[str, int]:
    """Host and port of a URL."""
    parts = urlsplit(url)
    assert parts.hostname, url
    assert parts.port, url
    return parts.hostname, parts.port

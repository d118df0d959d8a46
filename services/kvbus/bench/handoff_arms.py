"""The arms of `kvbus bench handoff`: one pair of engines each, all up at once, all but the one in turn stopped."""

import asyncio
import contextlib
import http
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import aiohttp
import msgspec

from kvbus.bench.probe import DIRECTORY_ENV
from kvbus.bus import Bus, BusSettings
from kvbus.embedded import EmbeddedNats
from kvbus.engine.launch import EngineOptions, kv_transfer_config, plain_environment, vllm_command, vllm_environment
from kvbus.errors import CommandFailed
from kvbus.local.children import Child, kvbus_command
from kvbus.local.ports import free_port
from kvbus.process import new_incarnation, process_name
from kvbus_schemas import Role

READY_MAX_S = 300.0
LOOK_EVERY_S = 0.2
BLOCK_SIZE = 32
MODEL_ARGUMENTS = [
    *("--served-model-name", "small"),
    *("--dtype", "float32"),
    *("--max-model-len", "4096"),
    *("--max-num-seqs", "8"),
    *("--max-num-batched-tokens", "256"),
    *("--block-size", str(BLOCK_SIZE)),
    *("--num-gpu-blocks-override", "544"),
    "--enforce-eager",
    "--disable-uvicorn-access-log",
]
"""The same for every arm. Chunks of 256 tokens; 544 blocks hold eight prompts of 1,800 tokens and their answers."""
ROLES: tuple[Role, Role] = ("prefill", "decode")

Legs = Literal["pull", "push", "kvbus"]


class ArmSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One variant of handing over."""

    name: str
    legs: Legs
    settings: dict[str, Any] = {}
    """Of kvbus's connector, on both engines."""


ARMS = (
    ArmSpec(name="stock_pull", legs="pull"),
    ArmSpec(name="stock_push", legs="push"),
    ArmSpec(name="kvbus_early", legs="kvbus"),
    ArmSpec(name="kvbus_whole", legs="kvbus", settings={"progressive": False}),
    ArmSpec(name="kvbus_matcher_in_prefill", legs="kvbus", settings={"matcher": "engine"}),
)
QUICK_ARMS = ("stock_push", "kvbus_early")


class ArmProcesses:
    """A running arm: two engines, and for kvbus a nats-server and a matcher of its own."""

    def __init__(self, spec: ArmSpec, model: Path, work_dir: Path) -> None:
        self.spec, self.model = spec, model
        self.directory = work_dir / spec.name
        self.engines: dict[Role, Child] = {}
        self.urls: dict[Role, str] = {}
        self.incarnations: dict[Role, str] = {}
        self.nats: EmbeddedNats | None = None
        self.matcher: Child | None = None
        self.bus: Bus | None = None
        """While the arm is not paused."""
        self.known: dict[str, Any] = {}
        """What a router of stock push has learned."""

    @property
    def probes(self) -> Path:
        return self.directory / "probes"

    async def start(self) -> None:
        """Start everything; return when both engines answer. Raises CommandFailed."""
        self.probes.mkdir(parents=True, exist_ok=True)
        if self.spec.legs == "kvbus":
            self.nats = EmbeddedNats(store_dir=self.directory / "nats")
            await asyncio.to_thread(self.nats.start)
            await self._connect()
            if self.spec.settings.get("matcher") != "engine":
                command = kvbus_command("matcher", "--nats", self.nats.url)
                self.matcher = Child("matcher", command, self.directory, os.environ | {"KVBUS_LOG_LEVEL": "info"})
        for role in ROLES:
            self._start_engine(role)
        await self._until_ready()

    def _start_engine(self, role: Role) -> None:
        port = free_port()
        self.urls[role], self.incarnations[role] = f"http://127.0.0.1:{port}", new_incarnation()
        start = self._kvbus_engine if self.spec.legs == "kvbus" else self._stock_engine
        command, environ = start(role, port)
        environ |= {DIRECTORY_ENV: str(self.probes)}
        self.engines[role] = Child(role, command + MODEL_ARGUMENTS, self.directory, environ)

    def _kvbus_engine(self, role: Role, port: int) -> tuple[list[str], dict[str, str]]:
        assert self.nats is not None
        options = EngineOptions(
            role=role,
            model=str(self.model),
            engine_id=role,
            incarnation=self.incarnations[role],
            port=port,
            nats=self.nats.url,
            extra=dict(self.spec.settings),
        )
        probed = kv_transfer_config(options) | {"kv_connector_module_path": "kvbus.bench.probe_kvbus"}
        return [*vllm_command(options), "--kv-transfer-config", json.dumps(probed)], vllm_environment(options)

    def _stock_engine(self, role: Role, port: int) -> tuple[list[str], dict[str, str]]:
        config = {
            "kv_connector": "NixlPullConnector" if self.spec.legs == "pull" else "NixlPushConnector",
            "kv_connector_module_path": "kvbus.bench.stock",
            "kv_role": "kv_producer" if role == "prefill" else "kv_consumer",
            "engine_id": f"{self.spec.name}-{role}",
        }
        command = [str(Path(sys.executable).parent / "vllm"), "serve", str(self.model), "--host", "127.0.0.1"]
        side_channel = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
        command += ["--port", str(port), "--kv-transfer-config", json.dumps(config)]
        return command, plain_environment() | side_channel

    async def _until_ready(self) -> None:
        deadline_s = time.monotonic() + READY_MAX_S
        async with aiohttp.ClientSession() as session:
            for role, url in self.urls.items():
                while not await _healthy(session, url):
                    self.engines[role].check()
                    if time.monotonic() > deadline_s:
                        raise CommandFailed(f"{self.spec.name}: {role} not ready: see {self.directory}")
                    await asyncio.sleep(LOOK_EVERY_S)

    def pids(self) -> dict[str, int]:
        """The first process of each part; an engine's others are in its process group."""
        found: dict[str, int] = {str(role): child.pid for role, child in self.engines.items()}
        if self.matcher is not None:
            found["matcher"] = self.matcher.pid
        if self.nats is not None:
            found["nats"] = self.nats.pid
        return found

    def groups(self) -> list[int]:
        """Process groups of our children."""
        return [child.pid for child in (*self.engines.values(), self.matcher) if child is not None]

    async def pause(self) -> None:
        """Stop every process of the arm where it is."""
        await self._disconnect()
        self._signal(signal.SIGSTOP)

    async def resume(self) -> None:
        """Let them go on."""
        self._signal(signal.SIGCONT)
        await self._connect()

    async def _connect(self) -> None:
        if self.nats is not None:
            settings = BusSettings(nats=self.nats.url)
            self.bus = await Bus.connect(settings, name=process_name("bench"), incarnation=new_incarnation())

    async def _disconnect(self) -> None:
        if self.bus is not None:
            await self.bus.close()
            self.bus = None

    def _signal(self, number: signal.Signals) -> None:
        for group in self.groups():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, number)
        if self.nats is not None and self.nats.running:
            os.kill(self.nats.pid, number)

    async def stop(self) -> None:
        self._signal(signal.SIGCONT)
        await self._disconnect()
        children = [*self.engines.values(), *([self.matcher] if self.matcher else [])]
        await asyncio.gather(*(child.stop() for child in children))
        if self.nats is not None:
            await asyncio.to_thread(self.nats.stop)


async def _healthy(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url + "/health", timeout=aiohttp.ClientTimeout(total=2)) as response:
            return response.status == http.HTTPStatus.OK
    except (aiohttp.ClientError, TimeoutError):
        return False


_GUARD = """
import os, signal, sys
groups = sys.stdin.read().split()
if groups[-1:] != ["done"]:
    for group in groups:
        try: os.killpg(int(group), signal.SIGKILL)
        except OSError: pass
"""


class Guard:
    """Ends the process groups it was told of when this process dies: a stopped process hears no other signal."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", _GUARD]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, text=True)  # noqa: S603

    def watch(self, groups: list[int]) -> None:
        self._say(" ".join(map(str, groups)))

    def done(self) -> None:
        """All has ended by itself."""
        self._say("done")
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _say(self, words: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(words + "\n")
        self._process.stdin.flush()


@contextlib.contextmanager
def guarded() -> Iterator[Guard]:
    guard = Guard()
    try:
        yield guard
    finally:
        guard.done()


async def start_arms(
    specs: list[ArmSpec], model: Path, work_dir: Path, guard: Guard, say: Callable[[str], None]
) -> list[ArmProcesses]:
    """Start the arms two at a time and stop each where it is. Raises CommandFailed."""
    arms = [ArmProcesses(spec, model, work_dir) for spec in specs]
    try:
        for at in range(0, len(arms), 2):
            some = arms[at : at + 2]
            say("starting " + " and ".join(arm.spec.name for arm in some))
            starts = [asyncio.create_task(arm.start()) for arm in some]
            await asyncio.sleep(0)
            await asyncio.gather(*starts)
            for arm in some:
                guard.watch(arm.groups())
                await arm.pause()
    except BaseException:
        await asyncio.gather(*(arm.stop() for arm in arms))
        raise
    return arms

"""The engines of `kvbus bench multiturn`: one pair with stock bidirectional pull, one with kvbus, one of them stopped.

The arms `off` and `kvbus_reuse` share a pair: without a conversation in its ticket, a turn leaves nothing behind.
"""

import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path

from kvbus.bench.handoff_arms import MODEL_ARGUMENTS, ROLES, ArmProcesses, ArmSpec, Guard
from kvbus.bench.probe import DIRECTORY_ENV
from kvbus.engine.launch import KV_ROLES
from kvbus.local.children import Child, kvbus_command
from kvbus.local.ports import free_port
from kvbus.process import new_incarnation
from kvbus_schemas import Role

STOCK_TTL_S = 60
"""How long stock decode pins a turn's blocks. Shorter than its default, so that a pair that was paused starts clean."""
LONGER = ["--max-model-len", "5120"]
SPECS = {
    "stock": ArmSpec(name="stock", legs="pull"),
    "kvbus": ArmSpec(name="kvbus", legs="kvbus"),
}
PAIR_OF = {"off": "kvbus", "stock_bidirectional": "stock", "kvbus_reuse": "kvbus"}
"""The arms, and whose engines each of them uses."""


class Pair(ArmProcesses):
    """Two engines; with kvbus also a nats-server, a matcher and a reuse process."""

    reuse: Child | None = None

    async def start(self) -> None:
        await super().start()
        if self.nats is not None:
            command = kvbus_command("reuse", "--nats", self.nats.url)
            self.reuse = Child("reuse", command, self.directory, os.environ | {"KVBUS_LOG_LEVEL": "info"})

    def _start_engine(self, role: Role) -> None:
        assert role in ROLES
        port = free_port()
        self.urls[role], self.incarnations[role] = f"http://127.0.0.1:{port}", new_incarnation()
        start = self._kvbus_engine if self.spec.legs == "kvbus" else self._stock_engine
        command, environ = start(role, port)
        environ |= {DIRECTORY_ENV: str(self.probes)}
        self.engines[role] = Child(role, command + MODEL_ARGUMENTS + LONGER, self.directory, environ)

    def _stock_engine(self, role: Role, port: int) -> tuple[list[str], dict[str, str]]:
        command, environ = super()._stock_engine(role, port)
        config = {
            "kv_connector": "NixlPullConnector",
            "kv_connector_module_path": "kvbus.bench.multiturn_stock",
            "kv_role": KV_ROLES[role],
            "engine_id": f"stock-{role}",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"bidirectional_kv_xfer": True, "decoder_kv_blocks_ttl": STOCK_TTL_S},
        }
        return [*command, "--kv-transfer-config", json.dumps(config)], environ

    def groups(self) -> list[int]:
        return super().groups() + ([self.reuse.pid] if self.reuse is not None else [])

    async def stop(self) -> None:
        await asyncio.gather(super().stop(), *([self.reuse.stop()] if self.reuse is not None else []))


async def start_pairs(arms: Sequence[str], model: Path, work_dir: Path, guard: Guard) -> dict[str, Pair]:
    """Start the pairs that these arms need and stop each where it is. Raises CommandFailed."""
    pairs = {name: Pair(SPECS[name], model, work_dir) for name in dict.fromkeys(PAIR_OF[arm] for arm in arms)}
    try:
        await asyncio.gather(*(pair.start() for pair in pairs.values()))
        for pair in pairs.values():
            guard.watch(pair.groups())
            await pair.pause()
    except BaseException:
        await stop_pairs(pairs)
        raise
    return pairs


async def stop_pairs(pairs: dict[str, Pair]) -> None:
    await asyncio.gather(*(pair.stop() for pair in pairs.values()))


class Stage:
    """Lets one pair run at a time."""

    def __init__(self, pairs: dict[str, Pair]) -> None:
        self.pairs = pairs
        self.running: Pair | None = None

    async def call(self, arm: str) -> tuple[Pair, bool]:
        """The arm's pair, running, the other one stopped; and whether it has just been let go on."""
        pair = self.pairs[PAIR_OF[arm]]
        if pair is self.running:
            return pair, False
        await self.clear()
        await pair.resume()
        self.running = pair
        return pair, True

    async def clear(self) -> None:
        """Stop the pair that runs."""
        if self.running is not None:
            await self.running.pause()
            self.running = None

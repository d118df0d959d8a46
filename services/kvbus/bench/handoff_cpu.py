"""CPU time of an arm's processes, by what each does."""

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

from kvbus.bench.handoff_arms import ArmProcesses

_TITLES = {"VLLM::EngineCor": "scheduler", "VLLM::Worker": "worker"}
"""Beginnings of the process names that vLLM gives itself."""


class _Process(NamedTuple):
    pid: int
    name: str
    group: int
    cpu_s: float


def cpu_seconds_of(arm: ArmProcesses) -> dict[str, float]:
    """CPU seconds since its start of each process of the arm: `prefill_http`, `prefill_scheduler`, ..., `nats`."""
    roles = {pid: part for part, pid in arm.pids().items()}
    seconds: dict[str, float] = {}
    for process in _processes():
        part = roles.get(process.pid) or roles.get(process.group)
        if part is None:
            continue
        name = f"{part}_{_kind(process.name)}" if part in arm.engines else part
        seconds[name] = seconds.get(name, 0.0) + process.cpu_s
    return seconds


def engine_share(before: dict[str, float], after: dict[str, float], role: str, elapsed_s: float) -> float:
    """Percent of one core that an engine, with all its processes, has used."""
    used_s = sum(after[name] - before.get(name, 0.0) for name in after if name.startswith(role + "_"))
    return 100.0 * used_s / elapsed_s


def _kind(name: str) -> str:
    return next((kind for title, kind in _TITLES.items() if name.startswith(title)), "http")


def _processes() -> list[_Process]:
    found = []
    tick = os.sysconf("SC_CLK_TCK")
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            head, _, tail = stat.read_text().rpartition(") ")
            fields = tail.split()
            name = head.partition("(")[2]
            cpu_s = (int(fields[11]) + int(fields[12])) / tick
            found.append(_Process(int(stat.parent.name), name, int(fields[2]), cpu_s))
    return found

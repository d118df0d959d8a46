"""What stock decode gives out for the next turn, from its scheduler's process to the client, by a file.

vLLM puts these parameters into whole replies only, never into a stream, and a stream is what time to first token is
measured on.
"""

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

from kvbus.bench.probe import DIRECTORY_ENV, request_in
from kvbus.errors import CommandFailed

SUFFIX = ".params"
WAIT_MAX_S = 5.0
LOOK_EVERY_S = 0.005


def give_out(request_id: str, params: dict[str, Any] | None) -> None:
    """In the engine: write them down, whole or not at all. Prefill's go into its reply and are left out."""
    directory = os.environ.get(DIRECTORY_ENV, "")
    if directory and params and not params.get("do_remote_prefill"):
        path = Path(directory) / (request_in(request_id) + SUFFIX)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(params))
        part.rename(path)


async def given_out(directory: Path, request_id: str) -> dict[str, Any]:
    """In the client: take them, once. Raises CommandFailed when there are none."""
    path, deadline_s = directory / (request_id + SUFFIX), time.monotonic() + WAIT_MAX_S
    while not path.exists():
        if time.monotonic() > deadline_s:
            raise CommandFailed(f"stock decode gave out nothing for the next turn: there is no {path}")
        await asyncio.sleep(LOOK_EVERY_S)
    params: dict[str, Any] = json.loads(path.read_text())
    path.unlink()
    return params

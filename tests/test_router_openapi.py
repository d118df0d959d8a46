"""What a router serves is written down as OpenAPI, and a router keeps to it whatever it is sent."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.light_world import all_quiet, ask

from kvbus import __version__
from kvbus.cli import schema
from kvbus.local.fleet import FleetOptions, start_fleet
from kvbus.router.openapi import ERRORS, openapi

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "schemas" / "kvbus.openapi.json"
EXAMPLES = 25
"""For each operation, beside those that cover each keyword of the document: some 400 requests in ten seconds."""
FUZZ_MAX_S = 200
SECRET = "canary-in-a-header"
LONG = 10
"""Characters of a generated text that do not come up in a log by themselves."""


def test_the_checked_in_document_is_current() -> None:
    assert DOCUMENT.read_text() == schema.document(schema.Form.OPENAPI), "run: kvbus schema openapi --out ..."


def test_every_error_code_of_the_router_is_in_the_document() -> None:
    sources = (ROOT / "services/kvbus/router").rglob("*.py")
    codes = {code for source in sources for code in re.findall(r'code(?:: str)? ?= ?"([a-z_]+)"', source.read_text())}
    assert not {code for code in codes if f"`{code}`" not in " ".join(ERRORS.values())}


def test_every_reference_of_the_document_leads_somewhere() -> None:
    document = openapi(__version__)
    for reference in _references(document):
        at: Any = document
        for part in reference.removeprefix("#/").split("/"):
            at = at[part]


@pytest.mark.nats
async def test_a_router_keeps_to_its_document_and_says_nothing_of_what_it_is_sent(tmp_path: Path) -> None:
    """Requests drawn from the document, right and wrong ones: every answer is one that it names, none is a 500, none
    takes long; afterwards every block is back and the next question is answered."""
    options = FleetOptions(engine="sim", work_dir=tmp_path, engine_settings={"reuse_ttl_s": "3"})
    async with start_fleet(options) as fleet, aiohttp.ClientSession() as http:
        said = _schemathesis(fleet.base_url, tmp_path)
        assert said.returncode == 0, said.stdout[-6000:]
        await all_quiet(http, [engine.url for engine in fleet.engines])
        answer = await ask(http, fleet.base_url, {"prompt": "hello"}, x_kvbus_mode="early")
        assert answer.texts
    entries = json.loads((tmp_path / "sent.har").read_text())["log"]["entries"]
    statuses = {entry["response"]["status"] for entry in entries}
    assert len(entries) > 200
    assert {200, 400, 405} <= statuses
    assert 500 not in statuses
    logs = {log: log.read_text() for log in fleet.log_dir.glob("*.log")}
    for log, text in logs.items():
        assert "Traceback" not in text, log
        assert SECRET not in text, log
        for content in _contents(entries):
            assert content not in text, log


def _schemathesis(url: str, directory: Path) -> "subprocess.CompletedProcess[str]":
    program = shutil.which("schemathesis", path=str(Path(sys.executable).parent))
    assert program, "pip install 'kvbus[dev]'"
    command = [program, "run", str(DOCUMENT), "--url", url, "--max-examples", str(EXAMPLES), "--seed", "1"]
    command += ["--phases", "coverage,fuzzing", "--workers", "1", "--request-timeout", "30", "--continue-on-failure"]
    # What an engine takes of a body is for the engine to say: a light one passes over most of it.
    command += ["--exclude-checks", "not_a_server_error,positive_data_acceptance,negative_data_rejection"]
    command += ["--suppress-health-check", "all", "--no-shrink", "--warnings", "off", "--output-sanitize", "false"]
    command += ["--header", f"X-Whatever: {SECRET}", "--report", "har", "--report-har-path", f"{directory}/sent.har"]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=FUZZ_MAX_S, check=False)


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _references(each)


def _contents(entries: list[dict[str, Any]]) -> set[str]:
    """The longer texts in the bodies that were sent."""
    found: set[str] = set()
    for entry in entries:
        try:
            found |= set(_texts(json.loads(entry["request"].get("postData", {}).get("text") or "null")))
        except ValueError:
            continue
    return {text for text in found if len(text) >= LONG} | {json.dumps(t)[1:-1] for t in found if len(t) >= LONG}


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each)

"""Bad input: no decoder raises anything but its declared errors. Random bytes, near misses, and what was once found."""

import json
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.fuzz.targets import TARGETS

HERE = Path(__file__).parent
CORPUS = HERE / "fuzz" / "corpus"
GOLDEN = HERE.parent / "schemas" / "golden"
bounded = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.data_too_large])

scalars = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=20)
json_values: st.SearchStrategy[Any] = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
)
FIELDS = [
    *("transfer_id", "role", "mode", "producer_id", "deadline_s", "reuse", "version", "chain", "kvbus", "messages"),
    *("conversation_id", "prompt_cache_key", "conversation", "tools", "prompt", "model", "n", "echo", "logprobs"),
    *("best_of", "max_tokens", "truncate_prompt_tokens", "vllm_xargs", "kv_transfer_params", "content", "id"),
]
objects = st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=6), json_values, max_size=8)
GOLDEN_BYTES = [path.read_bytes() for path in sorted(GOLDEN.glob("*.bin"))]
GOLDEN_TICKET = json.loads((GOLDEN / "Ticket.1.json").read_text())


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@given(st.binary(max_size=300))
@bounded
def test_random_bytes(target: Callable[[bytes], None], data: bytes) -> None:
    target(data)


@given(objects)
@example({"messages": [{"role": "user", "content": "\ud800"}]})
@bounded
def test_json_of_any_shape(value: dict[str, Any]) -> None:
    for target in TARGETS.values():
        target(json.dumps(value).encode())
        target(json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass"))


@given(st.sampled_from(GOLDEN_BYTES), st.data())
@bounded
def test_messages_with_a_field_gone_wrong(good: bytes, data: st.DataObject) -> None:
    fields = msgspec.msgpack.decode(good)
    name = data.draw(st.sampled_from(sorted(fields)))
    fields[name] = data.draw(json_values.filter(_packs) | st.binary(max_size=20))
    TARGETS["message"](msgspec.msgpack.encode(fields))
    TARGETS["kept"](msgspec.msgpack.encode(fields))


@given(st.sampled_from(GOLDEN_BYTES), st.integers(0, 10_000), st.binary(max_size=4), st.integers(0, 10_000))
@bounded
def test_messages_that_were_cut_or_changed(good: bytes, at: int, put: bytes, end: int) -> None:
    at %= len(good)
    TARGETS["message"]((good[:at] + put + good[at + len(put) :])[: end % len(good) or None])


@given(st.sampled_from(sorted(GOLDEN_TICKET)), json_values)
@bounded
def test_tickets_with_a_field_gone_wrong(name: str, value: Any) -> None:
    TARGETS["ticket"](json.dumps(GOLDEN_TICKET | {name: value}).encode())


@given(
    st.lists(st.sampled_from(["kvbus", "|", ":", "1", "-", "\u0661", "_", " ", "nan", "9" * 5000, "x"]), max_size=12)
)
@bounded
def test_notes_that_look_like_ours(parts: list[str]) -> None:
    TARGETS["landing"]("".join(parts).encode())


@pytest.mark.parametrize("depth", [100, 1_000, 100_000])
@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_depths_that_break_a_stack(target: Callable[[bytes], None], depth: int) -> None:
    for around in (
        b'{"messages":%b}',
        b'{"prompt":%b,"vllm_xargs":%b}',
        b'{"reuse":%b}',
        b'{"conversation":%b}',
        b"%b",
    ):
        for inner in (b"[" * depth + b"]" * depth, b'{"a":' * depth + b"1" + b"}" * depth, b"[" * depth):
            target(around.replace(b"%b", inner))
    target(b"\x91" * depth + b"\xc0")
    target(b"\x81\xa1a" * depth + b"\xc0")


@pytest.mark.parametrize("target", TARGETS)
def test_what_was_found_once(target: str) -> None:
    files = sorted((CORPUS / target).iterdir())
    assert files, f"a corpus of {target} is kept"
    for file in files:
        TARGETS[target](file.read_bytes())


ATHERIS_HAS_A_WHEEL = sys.platform == "linux" and platform.machine() == "x86_64" and sys.version_info < (3, 14)


@pytest.mark.skipif(not ATHERIS_HAS_A_WHEEL, reason="atheris has no wheel for this Python or machine")
@pytest.mark.parametrize("target", TARGETS)
def test_a_few_seconds_of_coverage_guided_fuzzing(target: str, tmp_path: Path) -> None:
    found = tmp_path / "found"  # libFuzzer writes what it finds into the first corpus
    found.mkdir()
    command = [sys.executable, str(HERE / "fuzz" / "run.py"), target, "-max_total_time=2", "-timeout=20"]
    command += [f"-artifact_prefix={tmp_path}/", str(found), str(CORPUS / target)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "cov:" in done.stderr, "it is guided by coverage"


def _packs(value: Any) -> bool:
    try:
        msgspec.msgpack.encode(value)
    except (OverflowError, UnicodeEncodeError):
        return False
    return True

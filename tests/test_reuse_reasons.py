"""Every reason that a reply can give for not reusing a conversation is explained in the README."""

import re
from pathlib import Path
from typing import get_args

import kvbus
from kvbus_schemas.reuse import MissReason

ROOT = Path(__file__).parent.parent
SAYING = re.compile(r'(?:let_go\((?:[\w.]+, )?|reason = |why = |why: str = |if mode == "local" else |else )"([a-z_]+)"')
NOT_REASONS = {"local", "prefill"}


def given_in(*paths: str) -> set[str]:
    """The reasons that these sources name."""
    sources = Path(kvbus.__file__).parent
    return {reason for path in paths for reason in SAYING.findall((sources / path).read_text())}


def test_every_reason_for_a_miss_is_explained() -> None:
    given = given_in("router/turn.py", "router/serving.py", "router/reusing.py", "engine/reuse_side.py")
    given |= given_in("engine/scheduler.py") - NOT_REASONS
    assert {"changed", "not_needed", "prefill_closed", "incompatible", "local"} <= given | {"local"}
    section = (ROOT / "README.md").read_text().split("\n## Conversations\n")[1].split("\n## ")[0]
    explained = set(re.findall(r"`([a-z_]+)`", " ".join(re.findall(r"^\| (`.*?) \|", section, re.MULTILINE))))
    assert given | set(get_args(MissReason)) <= explained

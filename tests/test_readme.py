"""The README tells the truth where a program can check it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvbus.cli import COMMANDS
from kvbus.settings_table import markdown

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_every_setting_stands_in_the_readme_as_it_is() -> None:
    """`kvbus schema settings` is what stands between the marks."""
    shown = README.split("<!-- settings -->\n")[1].split("<!-- end of settings -->")[0]
    assert shown.strip() == markdown().strip()


def test_every_command_that_the_readme_names_exists() -> None:
    named = set(re.findall(r"(?:^|[`/ ])kvbus ([a-z][a-z-]+)", README, flags=re.MULTILINE))
    known = {name.replace("_", "-") for name in COMMANDS}
    spoken = {"up", "coordinates", "in", "is", "says", "early", "reuse", "knows", "does", "takes", "asks"}
    assert named - spoken <= known, sorted(named - known)


def test_every_error_code_of_the_router_is_explained() -> None:
    sources = (Path(__file__).parent.parent / "services/kvbus/router").rglob("*.py")
    codes = {code for source in sources for code in re.findall(r'code(?:: str)? ?= ?"([a-z_]+)"', source.read_text())}
    assert not {code for code in codes if f"`{code}`" not in README}


@pytest.mark.parametrize("command", [name.replace("_", "-") for name in COMMANDS])
def test_every_command_explains_itself(command: str) -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "kvbus", command, "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    assert "Usage" in shown.stdout

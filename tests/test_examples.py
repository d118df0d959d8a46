"""The examples of schemas/examples are whole, short, run, and keep the contract that they are examples of."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.auth_world import World, secured

from kvbus.embedded import EmbeddedNats

pytestmark = pytest.mark.nats

EXAMPLES = Path(__file__).parent.parent / "schemas" / "examples"
LINES_MAX = 60
DEADLINE_MS = "5000"  # what is tested is the contract, not this machine
START_S = 60.0
NPM_TIMEOUT_S = 120.0
NPM_PACKAGES = ("@nats-io/transport-node@3", "@msgpack/msgpack@3")


@pytest.mark.parametrize("name", ["router.py", "router.mjs"])
def test_an_example_is_under_sixty_lines_and_needs_nothing_of_ours_but_the_schema(name: str) -> None:
    lines = (EXAMPLES / name).read_text().splitlines()
    assert len(lines) < LINES_MAX
    imports = [line for line in lines if line.startswith(("import", "from"))]
    assert not [line for line in imports if "kvbus." in line or "import kvbus" in line]
    if name.endswith("mjs"):
        assert "kvbus_schemas" not in "".join(imports)


@pytest.fixture(scope="session")
def node_modules() -> Path:
    """A directory of npm packages that stays for the next run."""
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    directory = Path(tempfile.gettempdir()) / f"kvbus-npm-{os.getuid()}"
    if not (directory / "whole").exists():
        directory.mkdir(mode=0o700, exist_ok=True)
        command = ["npm", "install", "--no-package-lock", "--no-audit", "--no-fund", "--no-save", "--prefer-offline"]
        done = subprocess.run(
            [*command, *NPM_PACKAGES], cwd=directory, timeout=NPM_TIMEOUT_S, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"npm install failed: {done.stderr[-500:]}"
        (directory / "whole").touch()
    return directory


def started(command: list[str], directory: Path, environ: dict[str, str] | None = None) -> Iterator[None]:
    """A process that says that it answers; ended afterwards."""
    env = os.environ | (environ or {})
    with subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        try:
            assert "answers" in process.stdout.readline(), "it ended by itself"
            yield
        finally:
            process.kill()


@pytest.fixture
def command(language: str, request: pytest.FixtureRequest) -> tuple[list[str], Path]:
    """How to start the example in that language, and where."""
    if language == "python":
        return [sys.executable, str(EXAMPLES / "router.py")], EXAMPLES
    directory: Path = request.getfixturevalue("node_modules")
    shutil.copy(EXAMPLES / "router.mjs", directory)
    return ["node", "router.mjs"], directory


async def conform(name: str, url: str, **environ: str) -> None:
    """`kvbus conformance` finds nothing wrong with it."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvbus", "conformance", "--guest", name, "--nats", url, "--json",
        "--deadline-ms", DEADLINE_MS, stdout=asyncio.subprocess.PIPE, env=os.environ | environ,
    )  # fmt: skip
    out, _ = await asyncio.wait_for(process.communicate(), START_S)
    report = json.loads(out)
    assert [check for check in report["checks"] if not check["passed"]] == []
    assert (report["passed"], process.returncode) == (True, 0)
    assert len(report["checks"]) > 20


@pytest.mark.parametrize("language", ["python", "javascript"])
async def test_an_example_passes_conformance(
    nats_server: EmbeddedNats, language: str, command: tuple[list[str], Path]
) -> None:
    name = f"{language}-example"
    for _ in started([*command[0], name, nats_server.url], command[1]):
        await conform(name, nats_server.url)


@pytest.fixture(scope="module")
def secure_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with secured(tmp_path_factory.mktemp("secured")) as found:
        yield found


@pytest.mark.parametrize("language", ["python", "javascript"])
async def test_an_example_needs_no_more_than_the_key_of_a_guest(
    secure_world: World, language: str, command: tuple[list[str], Path]
) -> None:
    access, url = secure_world.access, secure_world.server.url
    for _ in started([*command[0], "chooser", url], command[1], access.environ("chooser")):
        await conform("chooser", url, **access.environ("router-1"))

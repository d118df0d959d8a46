"""A light fleet with its console, as `kvbus up` starts it, and a real browser that looks at it."""

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import pytest
from tests.light_world import Answer, ask

from kvbus.embedded import EmbeddedNats
from kvbus.local.ports import free_port

WAIT_S = 60.0
POLL_S = 0.1
READY_S = 120.0
WORDS = "Everything that is decided inside the engines becomes a subscriber that can be watched. "
EARLY = {"x_kvbus_mode": "early"}
ENGINES = ["--prefill-tokens-per-s", "6000", "--token-us", "4000", "--blocks", "96"]
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
    *("--disable-default-apps", "--disable-extensions", "--hide-scrollbars"),
)
T = TypeVar("T")


def browser_problem() -> str:
    """Why no browser can be started here; empty when one can."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium is not installed: pip install 'kvbus[dev]'"
    if _chromium() is None or shutil.which("chromedriver") is None:
        return "there is no chromium and chromedriver: apt-get install chromium chromium-driver"
    return ""


def _chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def until(look: Callable[[], T], what: str) -> T:
    """What `look` gives once it is true. It may fail while the page changes under it."""
    deadline_s = time.monotonic() + WAIT_S
    last: object = None
    while time.monotonic() < deadline_s:
        try:
            found = look()
            if found:
                return found
        except Exception as error:  # an element may go while it is looked at
            last = error
        time.sleep(POLL_S)
    pytest.fail(f"not within {WAIT_S} s: {what} ({last})")


class World:
    """A running fleet."""

    def __init__(self, server: EmbeddedNats, line: dict[str, Any]) -> None:
        self.server = server
        self.base_url: str = line["base_url"]
        self.console_url: str = line["console_url"]

    def ask(self, body: dict[str, Any], **headers: str) -> Answer:
        """One request, answered."""

        async def main() -> Answer:
            async with aiohttp.ClientSession() as http:
                return await ask(http, self.base_url, body, **headers)

        return asyncio.run(main())

    def talk(self, name: str, turns: int) -> list[Answer]:
        """A conversation: each turn says all that was said before, and a little more. In between prefill is asked so
        much else that it keeps nothing of it in its own cache."""
        answers = []
        for turn in range(turns):
            body = {"prompt": f"{name}: {WORDS * 2 * (turn + 3)}", "conversation_id": name}
            answers.append(self.ask(body, **EARLY))
            for number in range(3 if turn + 1 < turns else 0):
                self.ask({"prompt": f"{number} {name} {WORDS * 18}", "max_tokens": 2}, **EARLY)
        return answers


@contextlib.contextmanager
def world(work_dir: Path, *arguments: str) -> Iterator[World]:
    """`kvbus up` with light engines and the console, on a nats-server that can be restarted."""
    command = [sys.executable, "-m", "kvbus", "up", "--engine", "sim", "--json", "--work-dir", str(work_dir)]
    with EmbeddedNats() as server:
        command += ["--nats", server.url, "--port", "0", "--console", "--console-port", str(free_port())]
        log = work_dir / "up.log"
        work_dir.mkdir(parents=True, exist_ok=True)
        with log.open("w") as stderr:
            up = subprocess.Popen([*command, *ENGINES, *arguments], stdout=subprocess.PIPE, stderr=stderr, text=True)
        assert up.stdout is not None
        try:
            line = up.stdout.readline()
            assert line, log.read_text()
            yield World(server, json.loads(line))
        finally:
            up.terminate()
            up.wait(timeout=READY_S)
            up.stdout.close()


class Page:
    """The console in a browser."""

    def __init__(self, driver: Any, url: str) -> None:
        self.driver = driver
        self.url = url

    def open(self, path: str = "/") -> None:
        """Load the page anew."""
        self.driver.get("about:blank")
        self.driver.get(self.url + path)

    def size(self, width: int, height: int) -> None:
        """A screen of so many pixels."""
        given = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", given)

    def colours(self, scheme: str) -> None:
        """`dark` or `light`."""
        given = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", given)

    def run(self, script: str, *given: Any) -> Any:
        """What the script returns."""
        return self.driver.execute_script(script, *given)

    def text(self, selector: str) -> str:
        """What is written there; empty where nothing is shown."""
        script = "const e = document.querySelector(arguments[0]); return e?.checkVisibility() ? e.innerText : ''"
        return str(self.run(script, selector))

    def rows(self, table: str) -> list[str]:
        """The rows of a table, each with a space between its cells."""
        script = "return [...document.querySelectorAll(`#${arguments[0]} tbody tr`)].map(r => r.innerText)"
        return [" ".join(row.split()) for row in self.run(script, table)]

    def click(self, selector: str) -> None:
        """As a person would, wherever it is."""
        self.run("document.querySelector(arguments[0]).click()", selector)

    def key(self, *keys: str) -> None:
        """Press keys where the focus is."""
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    def complaints(self) -> list[str]:
        """What the browser's own console says, the page's exceptions and refused content included."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def asked(self) -> set[str]:
        """Every address that the page has asked for since it was opened. What its policy forbids is a complaint."""
        return set(self.run("return performance.getEntriesByType('resource').map(entry => entry.name)"))


@contextlib.contextmanager
def browser(url: str) -> Iterator[Page]:
    """A fresh browser without a profile."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    with tempfile.TemporaryDirectory(prefix="kvbus-browser-", ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = _chromium() or ""
        for flag in (*FLAGS, f"--user-data-dir={profile}", "--window-size=1280,800"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        service = Service(shutil.which("chromedriver"), env=os.environ | {"HOME": profile})
        driver = webdriver.Chrome(options=options, service=service)
        try:
            driver.set_page_load_timeout(WAIT_S)
            driver.set_script_timeout(WAIT_S)
            yield Page(driver, url)
        finally:
            driver.quit()

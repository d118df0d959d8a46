"""From the core to the browsers: at most four frames a second, of what has changed. A browser that is slow gets the
newest state when it is ready and never a backlog: what waits for it is one value for each section."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

import msgspec

from kvbus.console.core import ConsoleCore, Filter
from kvbus.console.feed import Feed

FRAME_EVERY_S = 0.25
ALIVE_EVERY_S = 1.0
"""A browser hears from us at least so often, if only what time it is."""


class Browser:
    """One open page."""

    def __init__(self, wanted: Filter) -> None:
        self.wanted = wanted
        self._sent: dict[str, bytes] = {}
        self._waiting: dict[str, bytes] = {}
        self._news = asyncio.Event()

    def offer(self, sections: dict[str, bytes]) -> None:
        """This is the state now."""
        for name, value in sections.items():
            if self._sent.get(name) == value:
                self._waiting.pop(name, None)  # it changed and changed back
            else:
                self._waiting[name] = value
        if self._waiting:
            self._news.set()

    async def frames(self) -> AsyncIterator[dict[str, bytes]]:
        """What has changed since the last frame; empty when there was nothing for ALIVE_EVERY_S."""
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), ALIVE_EVERY_S)
            self._news.clear()
            waiting, self._waiting = self._waiting, {}
            self._sent |= waiting
            yield waiting


class TooManyBrowsersError(Exception):
    """No place for one more page."""


class Hub:
    """All open pages."""

    def __init__(self, core: ConsoleCore, feed: Feed, browsers_max: int) -> None:
        self._core, self._feed = core, feed
        self._browsers_max = browsers_max
        self._browsers: set[Browser] = set()

    def __len__(self) -> int:
        return len(self._browsers)

    @contextlib.contextmanager
    def joined(self, wanted: Filter) -> Iterator[Browser]:
        """A page while it is open; it has the whole state at once. Raises TooManyBrowsersError."""
        if len(self._browsers) >= self._browsers_max:
            raise TooManyBrowsersError
        browser = Browser(wanted)
        browser.offer(self._sections([wanted])[wanted])
        self._browsers.add(browser)
        try:
            yield browser
        finally:
            self._browsers.discard(browser)

    async def run(self) -> None:
        """Offer every page the state, until cancelled."""
        while True:
            if self._browsers:
                states = self._sections({browser.wanted for browser in self._browsers})
                for browser in self._browsers:
                    browser.offer(states[browser.wanted])
            await asyncio.sleep(FRAME_EVERY_S)

    def _sections(self, filters: "set[Filter] | list[Filter]") -> dict[Filter, dict[str, bytes]]:
        now_s = self._feed.now_s()
        common = self._core.common(now_s) | {"bus": self._feed.section()}
        encoded = {name: msgspec.json.encode(section) for name, section in common.items()}
        return {
            wanted: encoded | {"finished": msgspec.json.encode(self._core.finished(wanted, now_s))}
            for wanted in filters
        }

"""The observer on its bus: reads the trace as it grows, hears dead letters, measures how far the trace is behind."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Iterator

import structlog

from kvbus.bus import Bus
from kvbus.bus.jetstream import unix_of
from kvbus.errors import BusError
from kvbus.metrics.page import bus_readings, reading
from kvbus.metrics.tally import Distribution, Reading, Tally
from kvbus.observer.core import ObserverCore, process_of
from kvbus.observer.settings import ObserverSettings
from kvbus.trace.core import line_of
from kvbus_schemas import AnyMessage, EngineCard, UndecodableError, decode, subjects

log = structlog.get_logger(__name__)


class ObserverService:
    """`start` it, then `run`."""

    def __init__(self, bus: Bus, settings: ObserverSettings) -> None:
        self.tally = Tally()
        self.core = ObserverCore(self.tally)
        self._bus = bus
        self._settings = settings
        self._seq = 0
        self._roles: dict[str, str] = {}

    async def start(self) -> None:
        """From now on. Raises BusError."""
        await self._bus.observe(f"{subjects.DEAD_LETTERS}.>", self._dead_letter)
        await (await self._bus.bucket(subjects.ENGINES_BUCKET)).watch(self._on_card)
        self._seq = await self._bus.catch_up(subjects.everything(), _ignore, since_s=0)

    async def run(self, stopping: asyncio.Event) -> None:
        """Until `stopping`. While NATS is away nothing is read, and nothing is lost: the trace keeps it."""
        measured_s = 0.0
        while not stopping.is_set():
            try:
                await self._read()
                if time.monotonic() - measured_s >= self._settings.lag_every_s:
                    measured_s = time.monotonic()
                    await self._measure()
            except BusError as error:
                log.warning("trace_not_read", error=str(error))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), self._settings.poll_s)

    def readings(self) -> Iterator[Reading | Distribution]:
        """All metrics, now. Called by the page's thread."""
        yield from self.tally.readings()
        yield from self.tally.histograms()
        yield reading("kvbus_observer_stories", self.core.stories)
        for role, count in ({"prefill": 0, "decode": 0} | Counter(list(self._roles.values()))).items():
            yield reading("kvbus_observer_engines", count, role)
        yield from bus_readings(self._bus.counters, connected=self._bus.connected)

    async def _read(self) -> None:
        at_s = 0.0
        async for found in self._bus.replay(subjects.everything(), since_seq=self._seq):
            self._seq, at_s = found[0], found[1]
            self.core.hear(line_of(*found))
        self.core.tick(max(at_s, self._bus.server_unix_s()))

    async def _measure(self) -> None:
        """How long a message of ours takes until it can be read, and what the trace holds."""
        sent_s = time.monotonic()
        end = await self._bus.catch_up(subjects.everything(), _ignore, since_s=0)
        self.tally.put("kvbus_observer_capture_lag_seconds", round(time.monotonic() - sent_s, 6))
        if end < self._seq:
            self._seq = 0  # the trace was made anew
        info = await self._bus._jetstream.info(subjects.TRACE_STREAM)  # noqa: SLF001  (only an observer asks)
        state = info["state"] if info else {}
        self.tally.put("kvbus_observer_queue_messages", max(int(state.get("last_seq", 0)) - self._seq, 0))
        self.tally.put("kvbus_observer_trace_messages", int(state.get("messages", 0)))
        self.tally.put("kvbus_observer_trace_bytes", int(state.get("bytes", 0)))
        if state.get("messages"):
            age_s = self._bus.server_unix_s() - unix_of(state["first_ts"])
            self.tally.put("kvbus_observer_trace_age_seconds", round(max(age_s, 0.0), 3))

    def _dead_letter(self, subject: str, _letter: bytes) -> None:
        self.tally.add("kvbus_observer_dead_letters", process_of(subject.rpartition(".")[2]))

    def _on_card(self, key: str, value: bytes | None) -> None:
        if value is None:
            self._roles.pop(key, None)
            return
        with contextlib.suppress(UndecodableError):
            card = decode(value)
            if isinstance(card, EngineCard):
                self._roles[key] = card.role


def _ignore(_message: AnyMessage) -> None:
    pass

"""From the bus to the core: what is said now, after what was said before; for ever, also when NATS comes and goes."""

import asyncio
import contextlib
import re
from collections import deque
from dataclasses import dataclass
from time import monotonic, time
from typing import Any

import msgspec
import structlog

from kvbus.bus import Bus, GapDetector, Subscription
from kvbus.bus.inbound import check_subject
from kvbus.console.core import ConsoleCore
from kvbus.console.settings import ConsoleSettings
from kvbus.errors import BusError
from kvbus.process import new_incarnation, process_name
from kvbus.trace.core import Line, line_of
from kvbus.trace.reader import STORY_PLANES
from kvbus_schemas import DeadLetter, EngineCard, UndecodableError, decode, subjects

RETRY_S = 1.0
PROBE_EVERY_S = 1.0
LOADS_BACK_S = 10.0
"""Loads are said every 2 s: older ones tell nothing."""
OVERLAP_S = 5.0
"""After an absence the stream is read from so long before it; repeats change nothing."""
MESSAGES_PER_REQUEST = 5
"""Of one plane, at most, as a rule: no more of the past is read than the requests that are kept can be made of."""
WINDOWS = (1 / 512, 1 / 64, 1 / 8, 1.0)
WIDER = 8
"""How much longer each window is than the one before it."""
HELD_MAX = 100_000
"""Live messages that wait until the past has been read."""
STAMPS_MAX = 5_000

log = structlog.get_logger(__name__)
_PASSWORD = re.compile(r"//[^/@]*@")


@dataclass(slots=True)
class BusState:
    """How the console's own connection fares."""

    connected: bool = False
    catching_up: bool = False
    problem: str = "not connected yet"
    round_trip_ms: float = 0.0
    messages: int = 0
    per_s: float = 0.0
    undecodable: int = 0
    gaps: int = 0
    dropped: int = 0
    reconnects: int = 0


class Feed:
    """Keeps `core` told. `run` returns only when it is cancelled."""

    def __init__(self, settings: ConsoleSettings, core: ConsoleCore) -> None:
        self.state = BusState()
        self._settings = settings
        self._core = core
        self._bus: Bus | None = None
        self._reader: Bus | None = None
        """A connection of its own for what the stream is asked, so that answers do not wait behind what is said now."""
        self._name = process_name("console")
        self._incarnation = new_incarnation()
        self._gaps = GapDetector()
        self._live: Subscription | None = None
        self._held: deque[Line] | None = None
        self._serial = 0
        self._well_s = self._away_s = 0.0
        """When NATS was last known to be there, and since when it has been known to be away (0: it is not)."""
        self._probed = (0.0, 0)

    def now_s(self) -> float:
        """The server's clock."""
        return self._bus.server_unix_s() if self._bus is not None else time()

    def section(self) -> dict[str, Any]:
        """The state of the bus, as the page shows it."""
        state = self.state
        return {
            "connected": state.connected and self._bus is not None and self._bus.connected,
            "catching_up": state.catching_up,
            "problem": _PASSWORD.sub("//", state.problem),
            "nats": _PASSWORD.sub("//", self._settings.nats),
            "lag_ms": round(state.round_trip_ms, 2),
            "per_s": round(state.per_s, 1),
            "undecodable": state.undecodable,
            "gaps": state.gaps,
            "dropped": state.dropped,
            "reconnects": state.reconnects,
        }

    async def run(self) -> None:
        """Connect, stay connected, and look every second how the bus is."""
        while True:
            if await self._joined():
                break
            await asyncio.sleep(RETRY_S)
        while True:
            await self._probe()
            await asyncio.sleep(PROBE_EVERY_S)

    async def close(self) -> None:
        """Leave the bus."""
        buses, self._bus, self._reader = (self._bus, self._reader), None, None
        for bus in buses:
            if bus is not None:
                with contextlib.suppress(Exception):  # NATS may be going too: nothing of ours is lost
                    await bus.close()

    async def stamped(self, lines: list[Line]) -> list[Line]:
        """The same lines with the times at which the stream took them in, so that one clock measures all of them.
        What the stream does not tell (NATS is away, it is long ago) leaves the times of their arrival here."""
        if self._reader is None or not self._reader.connected or not lines:
            return lines
        stamps: dict[tuple[str, str, int], tuple[int, float]] = {}
        back_s = self.now_s() - min(line.at_s for line in lines) + OVERLAP_S
        try:
            for key in {line.message.key for line in lines}:
                about = subjects.everything_about(key)
                async for seq, at_s, _, message in self._reader.replay(about, since_s=back_s, limit=STAMPS_MAX):
                    stamps.setdefault((message.source, message.incarnation, message.seq), (seq, at_s))
        except BusError:
            return lines
        known = [stamps.get((line.message.source, line.message.incarnation, line.message.seq)) for line in lines]
        found = [line._replace(seq=at[0], at_s=at[1]) for line, at in zip(lines, known, strict=True) if at]
        return found if len(found) == len(lines) else lines

    async def _joined(self) -> bool:
        """True once everything is heard. What went wrong otherwise is shown, and tried again."""
        try:
            self._bus = await self._connect()
            self._reader = await self._connect()
            await self._listen(self._bus)
        except Exception as error:
            if not isinstance(error, BusError):
                log.exception("console_join_failed", error=repr(error))
            self._problem(str(error) or repr(error))
            await self.close()
            return False
        log.info("console_joined", nats=_PASSWORD.sub("//", self._settings.nats), requests=len(self._core.book))
        return True

    async def _connect(self) -> Bus:
        return await Bus.connect(self._settings, name=self._name, incarnation=self._incarnation)

    async def _listen(self, bus: Bus) -> None:
        self._held = deque(maxlen=HELD_MAX)
        self._live = await bus.observe(subjects.everything(), self._on_data)
        await bus.observe(f"{subjects.DEAD_LETTERS}.>", self._on_dead_letter)
        engines = await bus.bucket(subjects.ENGINES_BUCKET)
        await engines.watch(self._on_card)
        bus.on_connected.append(self._on_reconnected)
        self.state.connected, self.state.problem = True, ""
        self._well_s, self._away_s = self.now_s(), 0.0
        await self._catch_up(self._settings.history_s)

    async def _on_reconnected(self) -> None:
        self._held = deque(maxlen=HELD_MAX)
        back_s, self._away_s = self.now_s() - (self._away_s or self._well_s) + OVERLAP_S, 0.0
        await self._catch_up(min(back_s, self._settings.history_s))

    async def _catch_up(self, back_s: float) -> None:
        """Tell the core what the stream holds, then what was held back meanwhile."""
        self.state.catching_up = True
        try:
            if self._reader is not None:
                await self._reader.barrier()  # it comes back when it likes
            planes = [(f"{subjects.ROOT}.{plane}.>", back_s) for plane in STORY_PLANES]
            planes.append((f"{subjects.ROOT}.presence.>", min(back_s, LOADS_BACK_S)))
            lines = [line for subject, span_s in planes for line in await self._past(subject, span_s)]
            for line in sorted(lines, key=lambda line: line.seq):
                self._tell(line)
        except BusError as error:
            log.warning("console_without_past", error=str(error))
        finally:
            held, self._held = self._held or (), None
            for line in held:
                self._tell(line)
            self._gaps = GapDetector()
            self.state.catching_up = False

    async def _past(self, subject: str, span_s: float) -> list[Line]:
        """What was said on `subject` in the last `span_s` seconds, or in a shorter time where that is too much."""
        assert self._reader is not None
        most = self._settings.requests_max * MESSAGES_PER_REQUEST
        lines: list[Line] = []
        for share in WINDOWS:
            replay = self._reader.replay(subject, since_s=span_s * share, limit=most * WIDER)
            lines = [line_of(*found) async for found in replay]
            if len(lines) * WIDER > most:
                break
        return lines[-most:]

    def _on_data(self, subject: str, data: bytes) -> None:
        self.state.messages += 1
        try:
            message = decode(data)
            check_subject(subject, message)
        except UndecodableError:
            self.state.undecodable += 1
            return
        self.state.gaps += self._gaps.observe(message)
        line = line_of(0, self.now_s(), subject, message)
        if self._held is not None:
            self._held.append(line)
        else:
            self._tell(line)

    def _tell(self, line: Line) -> None:
        """Number it in the order in which the core hears it, whether it comes out of the stream or off the bus."""
        self._serial += 1
        self._core.hear(line._replace(seq=self._serial))

    def _on_dead_letter(self, _subject: str, data: bytes) -> None:
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
            self._core.dead_letter(msgspec.msgpack.decode(data, type=DeadLetter), self.now_s())

    def _on_card(self, engine_id: str, value: bytes | None) -> None:
        if value is None:
            self._core.board.card_gone(engine_id, self.now_s())
            return
        with contextlib.suppress(UndecodableError):
            card = decode(value)
            if isinstance(card, EngineCard) and card.engine_id == engine_id:
                self._core.board.card(card)

    async def _probe(self) -> None:
        """How long a word to the server and back takes, with everything that waits before it."""
        bus, state = self._bus, self.state
        assert bus is not None
        began_s = monotonic()
        with contextlib.suppress(BusError):  # too busy to answer in time is not away
            if bus.connected:
                await bus.barrier()
        if bus.connected:
            state.round_trip_ms = (monotonic() - began_s) * 1000
            state.connected, state.problem, self._well_s = True, "", self.now_s()
        else:
            self._problem(f"no connection to NATS at {self._settings.nats} ({bus.last_error or 'it does not answer'})")
        now_s, counters = monotonic(), bus.counters
        before_s, before = self._probed
        state.per_s = (state.messages - before) / max(now_s - before_s, 0.001) if before_s else 0.0
        self._probed = (now_s, state.messages)
        state.reconnects, state.dropped = counters.reconnects, self._live.dropped if self._live else 0

    def _problem(self, text: str) -> None:
        if self.state.connected or self.state.problem != text:
            log.warning("console_without_bus", problem=_PASSWORD.sub("//", text))
        self.state.connected, self.state.problem = False, text
        self._away_s = self._away_s or self.now_s()

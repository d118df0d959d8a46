"""The faults, carried out. Each method returns when what it hit may serve again; what it says is for the report."""

import asyncio
import contextlib
import itertools
import re
import time

import aiohttp

from kvbus.auth.setup import OBSERVER, OPERATOR
from kvbus.bus.link import Link
from kvbus.bus.settings import BusSettings
from kvbus.chaos.client import path_of
from kvbus.chaos.dice import Dice
from kvbus.chaos.ear import Ear, Heard
from kvbus.chaos.load import Clients
from kvbus.chaos.parts import Parts
from kvbus.chaos.permissions import without
from kvbus.chaos.plan import Fault
from kvbus.errors import BusError
from kvbus.local.fleet import Fleet
from kvbus_schemas import AnyMessage, BlocksRegistered, CancelOrdered, PushOrdered, RouteDecided, encode, subjects

STAGES: dict[str, type[AnyMessage]] = {"routed": RouteDecided, "registered": BlocksRegistered, "ordered": PushOrdered}
STAGE_MAX_S = 3.0
"""A client that waits for a stage which does not come leaves then."""
SENT_S = 0.02
OLD_S = 20.0
"""Messages of that age and more are old: their transfers have ended."""
TRANSFERS_AGAIN = 4
BURST = 6
JUNK_BYTES, JUNK_MAX = 200_000, 40
STREAM_BYTES_MIN = 1024 * 1024
RESTORE_TRIES = 20
FORGERIES = 5
_RANK = re.compile(r"-r\d+$")


class Faults:
    """One method for each kind, found by its name."""

    def __init__(
        self, fleet: Fleet, parts: Parts, ear: Ear, clients: Clients, http: aiohttp.ClientSession, seed: int
    ) -> None:
        self._fleet, self._parts, self._ear, self._clients, self._http = fleet, parts, ear, clients, http
        self._dice = Dice(seed, "faults")
        self._links: dict[str, Link] = {}
        self._numbers = itertools.count(1)
        self.forged: set[str] = set()
        """Keys that nobody but a forger has spoken of."""

    async def carry_out(self, fault: Fault) -> str:
        """Do it; a note for the report."""
        done: str = await getattr(self, f"_{fault.kind}")(fault)
        return done

    async def close(self) -> None:
        for link in self._links.values():
            await link.close()

    async def _kill(self, fault: Fault) -> str:
        await self._parts.kill(fault.target, fault.hold_s)
        return f"down for {fault.hold_s} s"

    async def _pause(self, fault: Fault) -> str:
        await self._parts.pause(fault.target, fault.hold_s)
        return f"stopped for {fault.hold_s} s"

    # Clients.

    async def _cut(self, fault: Fault) -> str:
        """A client of its own that leaves at a stage of its request."""
        script = self._dice.one_of(self._clients.known.cut)
        router, body, headers = self._clients.request_of(script, 0, f"cut-{next(self._numbers)}")
        body["stream"] = True
        asking = asyncio.create_task(
            self._half(router) if fault.way == "half_request" else self._ask(router, body, headers, fault.way)
        )
        if fault.way in STAGES:
            reached = await self._ear.until(headers["X-Request-Id"], STAGES[fault.way], STAGE_MAX_S)
            note = f"left when {fault.way}" if reached else f"left without having been {fault.way}"
        else:
            note = f"left at {fault.way}"
            await asyncio.wait({asking}, timeout=SENT_S if fault.way == "sent" else STAGE_MAX_S)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        return note

    async def _ask(self, router: str, body: dict[str, object], headers: dict[str, str], way: str) -> None:
        """Until cancelled, or as many bytes have come as the way of leaving wants."""
        with contextlib.suppress(aiohttp.ClientError, ConnectionError):
            url = self._clients.url(router) + path_of(body)
            async with self._http.post(url, json=body, headers=headers) as response:
                wanted = {"first_byte": 1, "mid_stream": 20, "nearly_done": 62}.get(way, 1000)
                events = 0
                async for chunk in response.content.iter_any():
                    events += chunk.count(b"data: ")
                    if events >= wanted:
                        response.close()
                        return

    async def _half(self, router: str) -> None:
        """A request whose body never comes to its end."""
        host, _, port = self._clients.url(router).removeprefix("http://").partition(":")
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5000\r\n\r\n{"prompt": [5, 6')
            await writer.drain()
            await asyncio.sleep(SENT_S)
            writer.close()

    async def _exhaust(self, _fault: Fault) -> str:
        """More long prompts at once than the engines have blocks for; each is compared like any other."""
        long = self._clients.known.long
        await asyncio.gather(*(self._clients.talk(self._dice.one_of(long)) for _ in range(BURST)))
        return f"{BURST} long prompts at once"

    # Messages.

    async def _duplicate(self, fault: Fault) -> str:
        """What was said of some transfers is said again, byte by byte, by those who said it."""
        heard = self._chosen(old=fault.way == "old")
        if fault.way == "reversed":
            heard.reverse()
        times = 3 if fault.way == "three_times" else 1
        said, refused = 0, 0
        for one in heard * times:
            try:
                link = await self._link(_RANK.sub("", one.subject.split(".")[4]))
                await link.publish(one.subject, one.data)
                said += 1
            except BusError:
                refused += 1
        return f"{said} messages again, {fault.way}" + (f", {refused} could not be said" if refused else "")

    def _chosen(self, *, old: bool) -> list[Heard]:
        """All about some transfers, and all reuse messages of the same time."""
        until_s = time.monotonic() - (OLD_S if old else 0.0)
        keys: dict[str, None] = {}
        for heard in reversed(self._ear.heard):
            if heard.at_s <= until_s and ".transfer." in heard.subject:
                keys[heard.subject.rsplit(".", 1)[-1]] = None
                if len(keys) >= TRANSFERS_AGAIN:
                    break
        about = [
            heard
            for heard in self._ear.heard
            if heard.subject.rsplit(".", 1)[-1] in keys and ".drain_ordered." not in heard.subject
        ]
        began_s = about[0].at_s if about else until_s
        reuse = [one for one in self._ear.heard if began_s <= one.at_s <= until_s and ".reuse." in one.subject]
        return sorted({*about, *reuse[-20:]}, key=lambda heard: heard.at_s)

    async def _link(self, party: str) -> Link:
        """A connection with that party's key."""
        if party not in self._links:
            assert self._fleet.access.directory is not None
            seed = self._fleet.access.directory / f"{party}.nk"
            settings = BusSettings(nats=self._fleet.nats_url, nkey_seed_file=str(seed), connect_timeout_s=2.0)
            self._links[party] = await Link.open(settings, party)
        return self._links[party]

    async def _forge(self, fault: Fault) -> str:
        """Somebody with a key of its own speaks in the name of an engine; NATS must not let it through."""
        key = f"f0f0{next(self._numbers):028x}"
        self.forged.add(key)
        order = CancelOrdered(transfer_id=key, reason="forged", source=fault.target)
        for sender in (OBSERVER, *("router-0", "matcher-0")):
            with contextlib.suppress(BusError):
                link = await self._link(sender)
                for _ in range(FORGERIES):
                    await link.publish(subjects.subject_of(order, sender=fault.target, to="all"), encode(order))
        return f"{3 * FORGERIES} cancellations in the name of {fault.target}"

    # The server.

    async def _deny(self, fault: Fault) -> str:
        """nats-server is told to let somebody no longer say something, and after a while to let it again."""
        conf, nats = self._fleet.access.conf, self._fleet.nats
        assert conf is not None
        assert nats is not None
        whole = conf.read_text(encoding="utf-8")
        conf.write_text(without(whole, fault.target, fault.way), encoding="utf-8")
        try:
            nats.reload()
            await asyncio.sleep(fault.hold_s)
        finally:
            conf.write_text(whole, encoding="utf-8")
            nats.reload()
        return f"could not say {fault.way.rstrip('.')} for {fault.hold_s} s"

    async def _fill(self, fault: Fault) -> str:
        """The trace has no room: either it forgets all that it has, or it takes in nothing more."""
        whole = (await self._ear.jetstream.api(f"STREAM.INFO.{subjects.TRACE_STREAM}"))["config"]
        small = whole | {"max_bytes": STREAM_BYTES_MIN, "discard": "new" if fault.way == "refuse_new" else "old"}
        await self._stream(small)
        try:
            junk = b"\xc1" * JUNK_BYTES
            subject = f"{subjects.ROOT}.presence.drain_ordered.{OPERATOR}.nobody.junk"
            for _ in range(JUNK_MAX):
                await self._ear.link.publish(subject, junk)
                await asyncio.sleep(0)
            await asyncio.sleep(fault.hold_s)
        finally:
            await self._restore(whole)
        return f"{JUNK_MAX * JUNK_BYTES // 1000} KB into a stream of {STREAM_BYTES_MIN // 1000} KB, {fault.way}"

    async def _stream(self, config: dict[str, object]) -> None:
        await self._ear.jetstream.api(f"STREAM.UPDATE.{subjects.TRACE_STREAM}", config)

    async def _restore(self, config: dict[str, object]) -> None:
        for left in reversed(range(RESTORE_TRIES)):
            try:
                await self._stream(config)
            except BusError:
                if not left:
                    raise
                await asyncio.sleep(0.5)
            else:
                return

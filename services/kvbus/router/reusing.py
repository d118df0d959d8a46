"""Conversations, as one router knows them: keys of requests, and claims on the bus."""

import asyncio
from collections.abc import Iterable
from time import monotonic

from kvbus.bus import Bus
from kvbus.conversations import key_of_request
from kvbus.conversations_client import GIVEN_SECRET_BYTES_MIN, ReuseClient, shared_secret
from kvbus.errors import ConfigError
from kvbus.router.bodies import Asked
from kvbus.router.door import Door
from kvbus.router.due import Due
from kvbus.router.fleet import Engine
from kvbus.router.http import Headers
from kvbus.router.settings import RouterSettings
from kvbus.router.turn import OFFERING_MODES, Turn
from kvbus_schemas import Mode

AGAIN_S = 0.003
"""How long after a miss the offer of a turn that has just ended is asked for once more."""
FINAL = ("unavailable", "incompatible")
"""Misses that no offer can change."""


class Reuse:
    """Raises ConfigError when the given secret is too short to be one."""

    def __init__(self, settings: RouterSettings, door: Door) -> None:
        if settings.reuse_secret and len(settings.reuse_secret.encode()) < GIVEN_SECRET_BYTES_MIN:
            raise ConfigError(f"reuse_secret must have {GIVEN_SECRET_BYTES_MIN} bytes or more: openssl rand -hex 32")
        self._settings = settings
        self._client = ReuseClient()
        self._secret = b""
        self._door = door
        self._due = Due()

    async def joined(self, bus: Bus) -> None:
        """The router is on the bus. Raises BusError."""
        if not self._settings.reuse:
            return
        await self._learn(bus)
        self._client.bus = bus

        async def again() -> None:
            await self._learn(bus)

        bus.on_connected.append(again)

    def turn_of(self, asked: Asked, headers: Headers) -> Turn:
        """A request's part in its conversation. Requests with several answers or prompts have none.

        The model's name is part of a conversation: the KV of another model, or adapter, is another one.
        """
        settings = self._settings
        if not settings.reuse or not self._secret or not asked.single or asked.local_reason:
            return Turn()
        scope = f"{self._door.tenant_of(headers)}\0{asked.model}"
        by_messages = settings.reuse_by_messages
        found = key_of_request(scope, asked.model, asked.members, headers, self._secret, by_messages=by_messages)
        turn = Turn(found[1] if found else "")
        if found and not self._client.connected:
            turn.reason = "unavailable"
        return turn

    async def claim(self, turn: Turn, request_id: str, prefills: Iterable[Engine] = ()) -> None:
        """Ask for the conversation's blocks, for one of `prefills`; takes at most `reuse_ask_ms`, and never raises.

        A turn may come within milliseconds of the last one's end, before its offer is known: then it is asked again.
        """
        layouts = {engine.compat_hash for engine in prefills}
        layout = layouts.pop() if len(layouts) == 1 else ""
        end_s = monotonic() + self._settings.reuse_ask_ms / 1000.0
        while True:
            left_s = end_s - monotonic()
            answer = await self._client.ask(
                turn.conversation, max(0.0, left_s), request_id=request_id, compat_hash=layout
            )
            turn.answered(answer)
            if answer.miss is None or answer.miss in FINAL or not self._worth_asking(turn, end_s - AGAIN_S):
                break
            await asyncio.sleep(AGAIN_S)
        if turn.is_open:
            self._due.taken(turn.conversation)

    def ended(self, turn: Turn, mode: Mode) -> None:
        """A turn has been answered in full: the next one may come at once."""
        if turn.conversation and mode in OFFERING_MODES:
            self._due.ended(turn.conversation, monotonic())

    def _worth_asking(self, turn: Turn, until_s: float) -> bool:
        now_s = monotonic()
        return now_s < until_s and self._due.expects(turn.conversation, now_s)

    async def close(self) -> None:
        """Wait for no more answers."""
        await self._client.close()

    async def _learn(self, bus: Bus) -> None:
        """The secret of all routers; after a reconnect it may be another one, of a new NATS."""
        self._secret = await shared_secret(bus, self._settings.reuse_secret)

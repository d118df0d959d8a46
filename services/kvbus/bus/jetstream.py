"""JetStream by its own JSON API: streams, direct reads without consumers, acknowledged writes."""

import asyncio
import math
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec
from nats.aio.msg import Msg

from kvbus.bus.calls import status_of
from kvbus.bus.errors import JetStreamError, NoRespondersError, RequestTimeoutError
from kvbus.bus.link import Link
from kvbus.errors import BusError

API_TIMEOUT_S = 3.0
READY_TIMEOUT_S = 5.0
"""How long JetStream may take to serve after its server has come up."""
READY_RETRY_S = 0.05
BATCH_MESSAGES = 256
NS = 1_000_000_000

STREAM_NOT_FOUND = 10059
CONFIG_DIFFERS = 10058
NOT_ENABLED = (10039, 10076)
"""For this account; on this server."""
WRONG_LAST_SEQUENCE = (10071, 10164)


@dataclass(frozen=True, slots=True)
class Stored:
    """A message as a stream keeps it. `unix_s` is the server's clock when it was stored."""

    seq: int
    unix_s: float
    subject: str
    data: bytes
    headers: dict[str, str]


def _stored(msg: Msg) -> Stored:
    headers = {str(name): str(value) for name, value in (msg.headers or {}).items()}
    return Stored(
        seq=int(headers["Nats-Sequence"]),
        unix_s=unix_of(headers["Nats-Time-Stamp"]),
        subject=headers["Nats-Subject"],
        data=msg.data,
        headers=headers,
    )


def unix_of(stamp: str) -> float:
    """Seconds since 1970 of an RFC 3339 stamp."""
    return datetime.fromisoformat(stamp).timestamp()


class JetStream:
    """The calls that kvbus needs. `clock_offset_s` is how far the server's clock is ahead of ours."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.clock_offset_s = 0.0

    def server_unix_s(self) -> float:
        """The time on the server's clock, to within half a round trip of the last `info`."""
        return time.time() + self.clock_offset_s

    async def api(self, call: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Answer of `$JS.API.<call>`. Raises JetStreamError when it is an error."""
        data = msgspec.json.encode(body) if body is not None else b""
        msg = await self.link.calls.one(f"$JS.API.{call}", data, timeout_s=API_TIMEOUT_S)
        answer: dict[str, Any] = msgspec.json.decode(msg.data)
        if "error" in answer:
            error = answer["error"]
            raise JetStreamError(f"JetStream refused {call}: {error.get('description', error)}", error.get("err_code"))
        return answer

    async def info(self, stream: str) -> dict[str, Any] | None:
        """What JetStream knows of a stream, or None if there is none; sets our idea of the server's clock."""
        sent_s = time.time()
        try:
            answer = await self.api(f"STREAM.INFO.{stream}")
        except JetStreamError as error:
            if error.code == STREAM_NOT_FOUND:
                return None
            raise
        self.clock_offset_s = unix_of(answer["ts"]) - (sent_s + time.time()) / 2
        return answer

    async def ensure(self, config: dict[str, Any], *, needs: tuple[str, ...]) -> None:
        """The stream exists with the settings of `config`; of one that exists already only `needs` are changed.

        Waits for JetStream up to READY_TIMEOUT_S, since a server that restarts serves it last.
        """
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while True:
            try:
                return await self._ensure_once(config, needs)
            except JetStreamError as error:
                if error.code not in NOT_ENABLED:
                    raise
                raise BusError(self._off(error)) from None
            except (NoRespondersError, RequestTimeoutError) as error:
                if time.monotonic() > deadline_s:
                    raise BusError(self._off(error)) from None
                await asyncio.sleep(READY_RETRY_S)

    def _off(self, error: BusError) -> str:
        return (
            f"JetStream does not serve us at {self.link.settings.nats} ({error}): "
            "start nats-server with -js, or enable it for this account"
        )

    async def _ensure_once(self, config: dict[str, Any], needs: tuple[str, ...]) -> None:
        name = config["name"]
        found = await self.info(name)
        if found is None:
            try:
                await self.api(f"STREAM.CREATE.{name}", config)
            except JetStreamError as error:
                if error.code != CONFIG_DIFFERS:  # another process was first, with other limits
                    raise
            found = await self.info(name)
        have = found["config"] if found else {}
        if any((have.get(need) or 0) != config[need] for need in needs):  # JetStream leaves out what is off
            await self.api(f"STREAM.UPDATE.{name}", have | {need: config[need] for need in needs})

    async def last(self, stream: str, subject: str) -> Stored | None:
        """The newest message on a subject, read without a consumer."""
        body = msgspec.json.encode({"last_by_subj": subject})
        msg = await self.link.calls.one(f"$JS.API.DIRECT.GET.{stream}", body, timeout_s=API_TIMEOUT_S)
        status = status_of(msg)
        if status == "404":
            return None
        if status:
            raise JetStreamError(f"cannot read {subject}: status {status}")
        return _stored(msg)

    async def read(
        self, stream: str, subject: str, *, after_seq: int = 0, since_s: float | None = None
    ) -> AsyncIterator[Stored]:
        """Everything on `subject` after `after_seq` and not older than `since_s` seconds, oldest first.

        Leaves nothing on the server. Ends when there is no more.
        """
        start: dict[str, Any] = {"seq": after_seq + 1}
        if since_s is not None:
            start = {"start_time": datetime.fromtimestamp(self.server_unix_s() - since_s, UTC).isoformat()}
        while True:
            batch, more = await self._batch(stream, subject, start)
            for stored in batch:
                if stored.seq > after_seq:
                    yield stored
            if not more or not batch:
                return
            start = {"seq": batch[-1].seq + 1}

    async def _batch(self, stream: str, subject: str, start: dict[str, Any]) -> tuple[list[Stored], bool]:
        body = msgspec.json.encode({"batch": BATCH_MESSAGES, "next_by_subj": subject, **start})
        parts, end = await self.link.calls.many(f"$JS.API.DIRECT.GET.{stream}", body, timeout_s=API_TIMEOUT_S)
        status = status_of(end)
        if status == "404":
            return [], False
        if status != "204":
            raise JetStreamError(f"cannot read {subject} of {stream}: status {status}")
        return [_stored(part) for part in parts], (end.headers or {}).get("Nats-Num-Pending", "0") != "0"

    async def put(self, subject: str, value: bytes, headers: dict[str, str]) -> int:
        """Store and wait for the acknowledgement; the sequence number that it got."""
        msg = await self.link.calls.one(subject, value, timeout_s=API_TIMEOUT_S, headers=headers)
        answer: dict[str, Any] = msgspec.json.decode(msg.data)
        if "error" in answer:
            error = answer["error"]
            raise JetStreamError(f"JetStream refused a write to {subject}: {error['description']}", error["err_code"])
        return int(answer["seq"])


def whole_seconds(ttl_s: float) -> int:
    """A lifetime as NATS takes it: whole seconds, rounded up, at least one. ValueError unless it is above zero."""
    if not ttl_s > 0:
        raise ValueError(f"a lifetime must be above 0 s, not {ttl_s}")
    return max(1, math.ceil(ttl_s))

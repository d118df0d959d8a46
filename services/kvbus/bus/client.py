"""nats-py's client, cured of what a slow server does to its reconnect, and telling when a message is a copy.

JetStream sends what it has stored to whatever reply subject it is given, and NATS checks permissions on subjects, not
on reply subjects. So whoever may read a stream could have it speak under any subject, and what another stream captures
of that stays there for whoever looks at the past. Such a copy is known by its headers: JetStream adds the origin each
time, so that what is read out of a stream has it once, and what was a copy when it was stored has it twice.
"""

from typing import Any

from nats.aio.client import Client as NatsClient
from nats.aio.client import Srv

RECONNECT_FLUSH_TIMEOUT_S = 5
ORIGIN = "Nats-Stream"
COPIED = "Kvbus-Copied"
"""A header that we add by ourselves; where somebody else has, it does no harm, since it only ever makes us refuse."""

_ORIGIN_LINE = f"{ORIGIN}:".encode()


class Client(NatsClient):
    """A reconnect asks the server for one more PONG before it counts as done. Where that PONG does not come, nats-py
    connects again and forgets the connection that it has: its socket stays open, and its reader wakes up later and
    reads beside the new one (`read() called while another coroutine is already waiting`). Here it is closed first.
    """

    async def flush(self, timeout: int = RECONNECT_FLUSH_TIMEOUT_S) -> None:  # noqa: ASYNC109  (nats-py's signature)
        """Wait for a PONG; nats-py itself gives a reconnect 10 s for it."""
        await super().flush(timeout)

    async def _connect_to_server(self, s: Srv) -> None:
        for task in (self._reading_task, self._ping_interval_task, self._flusher_task):
            if task is not None:
                task.cancel()
        if self._transport:
            self._transport.close()
        await super()._connect_to_server(s)

    async def _process_headers(self, headers: Any) -> dict[str, str] | None:
        """Adds COPIED where the raw headers name an origin more than once."""
        found: dict[str, str] | None = await super()._process_headers(headers)
        if found and headers.count(_ORIGIN_LINE) > 1:
            found[COPIED] = "true"
        return found

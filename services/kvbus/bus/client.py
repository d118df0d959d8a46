"""nats-py's client, cured of what a slow server does to its reconnect."""

from nats.aio.client import Client as NatsClient
from nats.aio.client import Srv

RECONNECT_FLUSH_TIMEOUT_S = 5


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

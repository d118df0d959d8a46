"""What a router needs of the reuse processes: a conversation's blocks, within a bound; and the shared secret."""

import asyncio
import contextlib
import secrets

import structlog

from kvbus.bus import Bus, KeyExistsError
from kvbus.bus.bounded import end
from kvbus.errors import BusError, ConfigError
from kvbus_schemas import ReuseAnswered, ReuseAsked, ReuseReleased

REUSE = "reuse"
"""Whom routers ask and engines tell; each of several processes answers to it."""
LATE_S = 5.0
"""For so long an answer that came too late for its asker is waited for, so that what it claimed is let go."""
SECRET_BYTES = 32
GIVEN_SECRET_BYTES_MIN = 16
SECRETS_BUCKET = "kvbus_secrets"
KEY_OF_SECRET = "conversations"  # noqa: S105  (the name of a key)
SECRET_TTL_S = 10 * 365 * 86_400
"""Ten years: buckets give every key a lifetime, and this one should outlast the installation."""

log = structlog.get_logger(__name__)


class ReuseClient:
    """Asks for conversations. `bus` may be set later, and may be None: then nothing is known of any."""

    def __init__(self, bus: Bus | None = None) -> None:
        self.bus = bus
        self.late = 0
        """Claims that were granted too late and let go."""
        self._open: set[asyncio.Task[ReuseAnswered]] = set()

    @property
    def connected(self) -> bool:
        """Whether anybody can be asked."""
        return self.bus is not None and self.bus.connected

    async def ask(
        self,
        conversation: str,
        timeout_s: float = 0.05,
        *,
        claim: bool = True,
        request_id: str = "",
        compat_hash: str = "",
    ) -> ReuseAnswered:
        """The grant of `conversation`, or why there is none. Never raises (but for the caller's own cancellation) and
        never takes longer than `timeout_s`: what is not answered by then is a miss `unavailable`.

        With `claim` the offer is taken and nobody else gets it; without, the grant has no transfer id and no chain.
        KV of another layout than `compat_hash` is left where it is, unless that is empty.
        A question that was on its way when NATS went may still claim when NATS is back; that is let go like any other
        answer that comes too late.
        """
        bus = self.bus
        if bus is None or not bus.connected:
            return _unavailable(conversation)
        asked = ReuseAsked(conversation=conversation, request_id=request_id, claim=claim, compat_hash=compat_hash)
        task = asyncio.create_task(self._request(bus, asked), name="reuse-ask")
        self._open.add(task)
        in_time = False
        try:
            await asyncio.wait({task}, timeout=timeout_s)
            in_time = task.done()
        finally:
            if in_time:
                self._open.discard(task)
            else:
                task.add_done_callback(self._came_late)
        return task.result() if in_time else _unavailable(conversation)

    async def close(self) -> None:
        """Wait no longer for late answers."""
        await end(*self._open)

    async def _request(self, bus: Bus, asked: ReuseAsked) -> ReuseAnswered:
        try:
            answer = await bus.request(asked, REUSE, timeout_s=LATE_S)
        except (BusError, ValueError) as error:
            log.debug("reuse_unavailable", conversation=asked.conversation[:32], error=str(error))
            return _unavailable(asked.conversation)
        if not isinstance(answer, ReuseAnswered) or answer.conversation != asked.conversation:
            log.warning("reuse_answer_wrong", kind=type(answer).__name__)
            return _unavailable(asked.conversation)
        return answer

    def _came_late(self, task: asyncio.Task[ReuseAnswered]) -> None:
        """Nobody waits any more: what was claimed is let go, so that its holder need not wait for its end."""
        grant = None if task.cancelled() else task.result().grant
        if grant is None or not grant.transfer_id or self.bus is None:
            self._open.discard(task)
            return
        self.late += 1
        released = ReuseReleased(
            conversation=grant.conversation, offer_id=grant.offer_id, transfer_id=grant.transfer_id, reason="late"
        )
        releasing = asyncio.create_task(self._release(self.bus, released, grant.holder_id, task.result()))
        self._open.add(releasing)
        self._open.discard(task)
        releasing.add_done_callback(self._open.discard)

    async def _release(self, bus: Bus, released: ReuseReleased, holder_id: str, answer: ReuseAnswered) -> ReuseAnswered:
        with contextlib.suppress(BusError, ValueError):
            await bus.publish(released, holder_id)
        return answer


async def shared_secret(bus: Bus, given: str = "", *, replicas: int = 1) -> bytes:
    """The secret of conversation keys: `given` (setting KVBUS_REUSE_SECRET), or one that whoever comes first makes and
    keeps in JetStream, on disk. Raises ConfigError when `given` is too short, BusError when JetStream does not serve.
    """
    if given:
        if len(given.encode()) < GIVEN_SECRET_BYTES_MIN:
            raise ConfigError(
                f"KVBUS_REUSE_SECRET must have {GIVEN_SECRET_BYTES_MIN} bytes or more: openssl rand -hex 32"
            )
        return given.encode()
    bucket = await bus.bucket(SECRETS_BUCKET, storage="file", replicas=replicas)
    fresh = secrets.token_bytes(SECRET_BYTES)
    try:
        await bucket.create(KEY_OF_SECRET, fresh, ttl_s=SECRET_TTL_S)
    except KeyExistsError:
        entry = await bucket.get(KEY_OF_SECRET)
        if entry is None:
            raise BusError(f"the secret in bucket {SECRETS_BUCKET} was there and is gone: try again") from None
        return entry.value
    return fresh


def _unavailable(conversation: str) -> ReuseAnswered:
    return ReuseAnswered(conversation=conversation, miss="unavailable")

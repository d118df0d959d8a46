"""An engine's own card: one process keeps it alive on the bus, and a lapse gets a new lease number."""

import contextlib
import time
from pathlib import Path

import msgspec
import structlog

from kvbus.bus import Bus, RevisionError
from kvbus.engine.peers import PRESENCE_LEASE_S
from kvbus_schemas import EngineCard, encode, subjects

log = structlog.get_logger()

LAPSE_S = PRESENCE_LEASE_S - 1.0
"""A card that is missing, and was sent less than this ago, has not expired: the server has lost it."""


def _boot_id() -> str:
    """Which boot of which host this is; processes with the same one share the monotonic clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


BOOT_ID = _boot_id()


class OwnCard:
    """What the process that keeps the card knows of it."""

    def __init__(self) -> None:
        self.announced = False
        self._lease = 1
        self._revision = 0
        """Of the card in the bucket."""
        self._put_s = 0.0

    async def put(self, bus: Bus, card: EngineCard, *, draining: bool) -> None:
        """Put the card where its predecessor is. If that has expired, others may have seen us gone and count us as
        fenced: what they were promised is void, which a new lease number says. (A restarted server has lost the card
        without its having expired.) Raises BusError."""
        bucket = await bus.bucket(subjects.ENGINES_BUCKET)
        now_s, revision = time.monotonic(), 0
        card = msgspec.structs.replace(
            bus.envelope(card), draining=draining, boot_id=BOOT_ID, lease=self._lease, put_monotonic_s=now_s
        )
        if self._revision:
            with contextlib.suppress(RevisionError):
                revision = await bucket.update(
                    card.engine_id, encode(card), revision=self._revision, ttl_s=PRESENCE_LEASE_S
                )
        if not revision:
            if self._put_s and now_s - self._put_s > LAPSE_S:
                self._lease += 1
            card = msgspec.structs.replace(card, lease=self._lease)
            revision = await bucket.put(card.engine_id, encode(card), ttl_s=PRESENCE_LEASE_S)
        self._revision, self._put_s = revision, now_s
        if not self.announced:
            self.announced = True
            log.info("engine_announced", engine_id=card.engine_id, incarnation=card.incarnation, role=card.role)

    async def withdraw(self, bus: Bus, engine_id: str) -> None:
        """Let nobody send anything here any more. Raises BusError."""
        if self.announced:
            await (await bus.bucket(subjects.ENGINES_BUCKET)).delete(engine_id)

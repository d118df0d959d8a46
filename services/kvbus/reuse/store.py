"""The bucket of conversations: read, ask for a verdict, write by compare-and-set, and once more where that was lost."""

from collections.abc import Callable

from kvbus.bus import Bucket, KeyExistsError, RevisionError
from kvbus.reuse.core import Found, Verdict
from kvbus.reuse.record import decode, encode

TRIES = 4
"""Each lost round means that somebody else has won one."""

Judge = Callable[[Found | None], Verdict]


class Store:
    """`lost` counts the rounds in which another process was faster."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self.lost = 0

    async def settle(self, key: str, judge: Judge) -> Verdict | None:
        """The verdict that was carried out; None when TRIES others were faster. Raises BusError."""
        for _ in range(TRIES):
            found = await self._find(key)
            verdict = judge(found)
            try:
                await self._carry_out(key, found, verdict)
            except (RevisionError, KeyExistsError):
                self.lost += 1
            else:
                return verdict
        return None

    async def _find(self, key: str) -> Found | None:
        entry = await self._bucket.get(key)
        if entry is None:
            return None
        if entry.remaining_s is None:
            return Found(None, entry.revision, 0.0)  # not one of ours: they all have a lifetime
        return Found(decode(entry.value), entry.revision, entry.remaining_s)

    async def _carry_out(self, key: str, found: Found | None, verdict: Verdict) -> None:
        record = verdict.write
        if record is not None and found is None:
            await self._bucket.create(key, encode(record), ttl_s=record.lifetime_s)
        elif record is not None and found is not None:
            await self._bucket.update(key, encode(record), revision=found.revision, ttl_s=record.lifetime_s)
        elif verdict.delete and found is not None:
            await self._bucket.delete(key, revision=found.revision)

"""One of several processes is the active one: a lease in a bucket, renewed by compare-and-set.

The holder counts from the moment it *sent* its last successful renewal and considers itself deposed FENCE_S later; a
standby counts from the moment it first *saw* that renewal and takes over after TAKE_OVER_S. So the holder stops
before another one starts, whatever the clocks say, as long as they run at the same speed.
"""

from kvbus.bus import Bucket, KeyExistsError, RevisionError
from kvbus.errors import BusError

TTL_S = 3
RENEW_S = 1.0
POLL_S = 0.2
FENCE_S = 2.25
TAKE_OVER_S = 2.5


class Lease:
    """This process's claim to `key`, as `owner`. Call `step` every `pause_s` seconds; times are monotonic seconds."""

    def __init__(self, bucket: Bucket, key: str, owner: str) -> None:
        self._bucket = bucket
        self._key = key
        self._owner = owner.encode()
        self._revision: int | None = None
        self._held_until_s = 0.0
        self._seen: tuple[int, float] = (0, 0.0)

    def is_held(self, now_s: float) -> bool:
        """True while nobody else can hold the lease."""
        return self._revision is not None and now_s < self._held_until_s

    @property
    def pause_s(self) -> float:
        """Until the next step."""
        return POLL_S if self._revision is None else RENEW_S

    async def step(self, now_s: float) -> None:
        """Renew the lease, or take it if nobody renews it. A lost lease, or a lost bus, is no error."""
        try:
            revision = await (self._take(now_s) if self._revision is None else self._write(self._revision))
        except (RevisionError, KeyExistsError):
            revision = None
        except BusError:
            self._revision = self._revision if self.is_held(now_s) else None
            return
        self._revision = revision
        self._held_until_s = now_s + FENCE_S

    async def give_up(self) -> None:
        """Let a standby take over at once."""
        if self._revision is not None:
            revision, self._revision = self._revision, None
            await self._bucket.delete(self._key, revision=revision)

    async def _take(self, now_s: float) -> int | None:
        entry = await self._bucket.get(self._key)
        if entry is None:
            return await self._bucket.create(self._key, self._owner, ttl_s=TTL_S)
        if entry.revision != self._seen[0]:
            self._seen = (entry.revision, now_s)
        return await self._write(entry.revision) if now_s - self._seen[1] >= TAKE_OVER_S else None

    async def _write(self, revision: int) -> int:
        return await self._bucket.update(self._key, self._owner, revision=revision, ttl_s=TTL_S)

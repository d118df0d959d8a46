"""What was offered and withdrawn while no reuse process listened: out of the stream, with ages on its own clock."""

import contextlib

from kvbus.bus import Bucket, Bus, KeyExistsError
from kvbus_schemas import LoadReported, ReuseOffered, ReuseWithdrawn, subjects

HEARD_KEY = "reuse_heard"
"""Key of the bucket of leases that every reuse process renews while it listens."""
HEARD_TTL_S = 3600.0
BORN_KEY = "reuse_born"
"""Key of the same bucket, which is in memory: it is as old as all that the server has there."""
BORN_TTL_S = 365 * 86_400.0
OVERLAP_S = 5.0
"""What a process that died had heard and not yet stored is younger than this."""
LOAD_PERIODS_S = 5.0
"""A live engine has reported its load within this time, which tells the stream's clock."""

Aged = tuple[float, ReuseOffered | ReuseWithdrawn]


async def known_s(leases: Bucket) -> float:
    """For how long the server has kept what is kept in memory; 0 from now on when it has been restarted since."""
    entry = await leases.get(BORN_KEY)
    if entry is not None and entry.remaining_s is not None:
        return BORN_TTL_S - entry.remaining_s
    with contextlib.suppress(KeyExistsError):
        await leases.create(BORN_KEY, b"", ttl_s=BORN_TTL_S)
    return 0.0


async def note_listening(leases: Bucket) -> None:
    """Somebody listens at this moment."""
    await leases.put(HEARD_KEY, b"", ttl_s=HEARD_TTL_S)


async def deaf_s(leases: Bucket, *, at_most_s: float) -> float:
    """For how long nobody has listened, by the server's clock, with some overlap."""
    entry = await leases.get(HEARD_KEY)
    if entry is None or entry.remaining_s is None:
        return at_most_s
    return min(HEARD_TTL_S - entry.remaining_s + OVERLAP_S, at_most_s)


async def heard_before(bus: Bus, *, since_s: float) -> list[Aged]:
    """Offers and withdrawals of the last `since_s` seconds, oldest first, each with its age in seconds.

    Ages count from the newest stamp in the stream, so that no two clocks are compared: with one live engine they are
    at most 2 s too young, and holders keep their offers' ends themselves.
    """
    found: list[tuple[int, float, ReuseOffered | ReuseWithdrawn]] = []
    newest_s = 0.0
    for kind in (ReuseOffered, ReuseWithdrawn):
        async for seq, unix_s, _, message in bus.replay(subjects.of_kind(kind), since_s=since_s):
            if isinstance(message, ReuseOffered | ReuseWithdrawn):
                found.append((seq, unix_s, message))
                newest_s = max(newest_s, unix_s)
    async for _, unix_s, _, _ in bus.replay(subjects.of_kind(LoadReported), since_s=LOAD_PERIODS_S):
        newest_s = max(newest_s, unix_s)
    found.sort(key=lambda one: one[0])
    return [(newest_s - unix_s, message) for _, unix_s, message in found]

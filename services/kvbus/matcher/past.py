"""What a matcher missed: its messages out of the stream, with their ages on the stream's own clock."""

from kvbus.bus import Bus
from kvbus_schemas import AnyMessage, LoadReported, subjects

TRANSFERS = f"{subjects.ROOT}.transfer.>"
LOAD_PERIODS_S = 5.0
"""A live engine has reported its load within this time, which tells the stream's clock."""

Aged = tuple[float, AnyMessage]


async def heard_before(bus: Bus, heard: tuple[str, ...], *, since_seq: int, since_s: float) -> tuple[int, list[Aged]]:
    """Messages on the subjects `heard`, after `since_seq`, at most `since_s` seconds old, oldest first, each with its
    age in seconds; and the sequence number to go on from.

    Ages count from the newest stamp in the stream, so that no two clocks are compared: with one live engine they are
    at most 2 s too young, and consumers keep their leases themselves.
    """
    end = await bus.catch_up(TRANSFERS, _ignore, since_seq=since_seq, since_s=0)
    since_seq = since_seq if since_seq <= end else 0  # the stream was made anew
    newest_s, found = 0.0, []
    async for seq, unix_s, subject, message in bus.replay(TRANSFERS, since_seq=since_seq, since_s=since_s):
        newest_s = max(newest_s, unix_s)
        if seq <= end and any(_matches(pattern, subject) for pattern in heard):
            found.append((unix_s, message))
    async for _, unix_s, _, _ in bus.replay(subjects.of_kind(LoadReported), since_s=LOAD_PERIODS_S):
        newest_s = max(newest_s, unix_s)
    return end, [(newest_s - unix_s, message) for unix_s, message in found]


def _ignore(_message: AnyMessage) -> None:
    pass


def _matches(pattern: str, subject: str) -> bool:
    """True if the subject fits a pattern of the bus's grammar, in which `*` stands for one token."""
    pairs = zip(pattern.split("."), subject.split("."), strict=False)
    return all(want in ("*", token) for want, token in pairs)

"""What the bus raises besides BusError itself; all of it is a BusError."""

from kvbus.errors import BusError


class RequestTimeoutError(BusError):
    """Nobody answered in time; the work may have been done or not."""


class NoRespondersError(BusError):
    """NATS knows nobody who listens on this subject."""


class JetStreamError(BusError):
    """JetStream refused. `code` is its error code, `None` outside its list."""

    def __init__(self, text: str, code: int | None = None) -> None:
        super().__init__(text)
        self.code = code


class KeyExistsError(BusError):
    """The key is there already: somebody else was first."""

    def __init__(self, bucket: str, key: str) -> None:
        super().__init__(f"key {key!r} exists in bucket {bucket!r}")
        self.key = key


class RevisionError(BusError):
    """The key has changed, or is gone, since the revision that was named."""

    def __init__(self, bucket: str, key: str, revision: int) -> None:
        super().__init__(f"key {key!r} in bucket {bucket!r} is no longer at revision {revision}: read it again")
        self.key = key
        self.revision = revision

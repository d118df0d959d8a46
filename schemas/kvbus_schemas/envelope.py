"""What every message carries, whatever it says."""

from typing import ClassVar, Literal

import msgspec

Plane = Literal["presence", "route", "transfer", "reuse", "cache"]

EVERYONE = "all"
"""The receiver of a message that is for whoever wants to know."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """The envelope. A core leaves it empty; the bus fills it in when it publishes.

    Facts are named in the past tense, orders in the imperative. A message only ever gains optional fields;
    readers ignore fields that they do not know.
    """

    PLANE: ClassVar[Plane]

    source: str = ""
    """Stable name of the sender: an engine_id, or a process name such as `router-7f3a`."""
    incarnation: str = ""
    """New at every start of the sender; what an earlier incarnation said no longer binds anyone."""
    seq: int = 0
    """Counts the sender's messages from 1, per incarnation, so that a gap is visible."""
    sent_unix_us: int = 0
    """Wall clock of the sender, in microseconds, for people; nothing is decided from it."""
    trace_id: str = ""
    """W3C trace id: 32 hexadecimal digits, or empty."""
    span_id: str = ""
    """W3C span id: 16 hexadecimal digits, or empty."""

    @property
    def key(self) -> str:
        """What the message is about: the last token of its subject."""
        raise NotImplementedError


class Post(msgspec.Struct, frozen=True):
    """A message and whom it is for: what a core gives its shell to publish."""

    to: str
    message: Message

"""Subjects: `kvbus.v1.<plane>.<event>.<from>.<to>.<key>`, the same grammar for every message.

One subscription sees all that concerns one transfer (`everything_about(key)`), and a permission can pin who may
speak in whose name (`spoken_by(name)`).
"""

import re

from kvbus_schemas.envelope import Message

ROOT = "kvbus.v1"
DEAD_LETTERS = "kvbus.dead"
"""Prefix of the subjects on which processes report bytes that they could not take."""

ENGINES_BUCKET = "kvbus_engines"
CONVERSATIONS_BUCKET = "kvbus_conversations"
LEASES_BUCKET = "kvbus_leases"
ROUTING_BUCKET = "kvbus_routing"
"""What routers watch: who decides for which share of the requests."""
TRACE_STREAM = "KVBUS"
"""The JetStream stream that captures every message: the trace, and the memory of processes that restart."""

_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,64}")
_CAMEL = re.compile(r"(?<!^)(?=[A-Z])")


class SubjectTokenError(ValueError):
    """A name that cannot stand in a subject."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name[:80]!r} cannot stand in a subject: use 1 to 64 letters, digits, '_' or '-' (engine_id and such)"
        )


def token(name: str) -> str:
    """`name`, if it can stand in a subject; else SubjectTokenError."""
    if not _TOKEN.fullmatch(name):
        raise SubjectTokenError(name)
    return name


def event_of(kind: type[Message]) -> str:
    """The event token of a message type: `BlocksRegistered` is `blocks_registered`."""
    return _CAMEL.sub("_", kind.__name__).lower()


def subject_of(message: Message, *, sender: str, to: str) -> str:
    """Where `sender` publishes `message` for `to`."""
    kind = type(message)
    return f"{ROOT}.{kind.PLANE}.{event_of(kind)}.{token(sender)}.{token(to)}.{token(message.key)}"


def of_kind(kind: type[Message], *, to: str = "*") -> str:
    """Every message of one type, from anyone, optionally only those for `to`."""
    return f"{ROOT}.{kind.PLANE}.{event_of(kind)}.*.{to}.*"


def addressed_to(name: str, plane: str = "*") -> str:
    """Every message of a plane that is for `name`."""
    return f"{ROOT}.{plane}.*.*.{token(name)}.*"


def everything_about(key: str) -> str:
    """Every message about one transfer, conversation or engine."""
    return f"{ROOT}.*.*.*.*.{token(key)}"


def spoken_by(name: str) -> str:
    """Every subject on which `name` may speak."""
    return f"{ROOT}.*.*.{token(name)}.>"


def everything() -> str:
    """The whole bus."""
    return f"{ROOT}.>"


def dead_letters_of(name: str) -> str:
    """Where `name` reports what it could not take."""
    return f"{DEAD_LETTERS}.{token(name)}"

"""Every decoder, as a function of bytes: what it raises beyond its declared errors is a fault.

`tests/test_fuzz.py` calls them with hypothesis, `tests/fuzz/run.py` with atheris.
"""

import contextlib
import json
from collections.abc import Callable

import msgspec
from tests.fuzz.over_http import http

from kvbus.auth.api_keys import ApiKeys, parse
from kvbus.bus.inbound import check_subject
from kvbus.conversations import conversation_key, conversation_of, key_of_request, leading_messages_key
from kvbus.engine.facts import landing_note, read_landing_note
from kvbus.errors import ConfigError
from kvbus.reuse import record
from kvbus.router import bodies
from kvbus.router.identity import identify
from kvbus.router.problems import BadRequestError
from kvbus_schemas import (
    MessageTooLargeError,
    TicketError,
    UndecodableError,
    decode,
    encode,
    subjects,
    ticket_from_params,
)

SECRET = b"0123456789abcdef"
KEY_DIGITS = 32
REQUEST_ID_MAX = 256


def ticket(data: bytes) -> None:
    """The ticket of an engine's request, and what an engine does with it first. TicketError."""
    try:
        params = json.loads(data)
    except (ValueError, RecursionError):
        return
    for given in (params, {"kvbus": params}):
        with contextlib.suppress(TicketError):
            found = ticket_from_params(given)
            if found is not None:
                assert ticket_from_params(found.to_params()) == found
                found.check(found.producer_id, found.producer_incarnation)


def message(data: bytes) -> None:
    """A message of the bus: UndecodableError, or one that comes out the same once more."""
    try:
        found = decode(data)
    except UndecodableError:
        return
    with contextlib.suppress(MessageTooLargeError):
        again = encode(found)
        assert encode(decode(again)) == again  # not ==: NaN is a float too
    with contextlib.suppress(UndecodableError):
        check_subject("kvbus.v1.transfer.cancel_ordered.a.b.c", found)
    with contextlib.suppress(subjects.SubjectTokenError):
        check_subject(subjects.subject_of(found, sender=found.source, to="all"), found)


def subject(data: bytes) -> None:
    """Names and subjects as others give them. SubjectTokenError; a good name changes no subject's shape."""
    name = data.decode("utf-8", "surrogateescape")
    with contextlib.suppress(subjects.SubjectTokenError):
        assert subjects.token(name) == name
        assert subjects.spoken_by(name).count(".") == 5
        assert not set(name) & set(".*> \t\r\n")
    with contextlib.suppress(UndecodableError):
        check_subject(name, decode(encode(_CARD)))


def landing(data: bytes) -> None:
    """A NIXL notification: ours, or None. What we write we read."""
    found = read_landing_note(data)
    if found is not None:
        assert read_landing_note(f"{landing_note(*found)}:1".encode()) == found


def conversation(data: bytes) -> None:
    """A body's and a header's conversation: a key of 32 digits, or none; nothing is raised."""
    text = data.decode("utf-8", "surrogateescape")
    assert len(conversation_key(text, text, SECRET)) == KEY_DIGITS
    headers = [(b"x-conversation-id", data)]
    try:
        members = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        members = {"messages": msgspec.Raw(data), "conversation": msgspec.Raw(data)}
    conversation_of(members, headers)
    for given in (headers, []):
        found = key_of_request("t", "m", members, given, SECRET)
        assert found is None or len(found[1]) == KEY_DIGITS
    leading_messages_key("t", "m", members, SECRET)


def body(data: bytes) -> None:
    """A client's body: BadRequestError, or two legs whose bodies are JSON with our params in them."""
    params = b'{"kvbus":{}}'
    with contextlib.suppress(BadRequestError):
        bodies.read_other(data)
    bodies.params_of(data)
    for kind in ("completions", "chat"):
        try:
            asked = bodies.read(kind, data)
        except BadRequestError:
            continue
        assert asked.parts >= 1
        for leg in (bodies.prefill_body(asked, params), bodies.decode_body(asked, params)):
            assert bodies.params_of(leg) == params


def header(data: bytes) -> None:
    """A client's ids: what goes on is short, and harmless in a header and in a log."""
    found = identify([(b"x-request-id", data), (b"traceparent", data)])
    assert 0 < len(found.request_id) <= REQUEST_ID_MAX
    assert found.request_id.isascii()
    assert found.request_id.isprintable()


def kept(data: bytes) -> None:
    """A value of the bucket of conversations: a record or None."""
    found = record.decode(data)
    assert found is None or record.decode(record.encode(found)) is not None


def api_keys(data: bytes) -> None:
    """A file of API keys (ConfigError), and a key that somebody shows."""
    text = data.decode("utf-8", "surrogateescape")
    with contextlib.suppress(ConfigError):
        parse(text)
    assert ApiKeys([("t", bytes(32))]).tenant_of(text) is None


_CARD = decode(
    msgspec.msgpack.encode(
        {"type": "CancelOrdered", "transfer_id": "c", "reason": "r"},
    )
)

TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target
    for target in (ticket, message, subject, landing, conversation, body, header, kept, api_keys, http)
}

"""The wire: golden bytes decode for ever, bad bytes are refused, subjects and tickets are what they should be.

`python tests/test_schemas.py` writes the golden files that are missing; those that exist are never touched.
"""

import contextlib
import json
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus_schemas import (
    KINDS,
    MESSAGE_BYTES_MAX,
    BlocksRegistered,
    CancelOrdered,
    Message,
    MessageTooLargeError,
    PushDone,
    Ticket,
    TicketError,
    UndecodableError,
    decode,
    encode,
    subjects,
    ticket_from_params,
)
from kvbus_schemas.presence import DeadLetter

GOLDEN = Path(__file__).parent.parent / "schemas" / "golden"
EVERY_STRUCT: tuple[type[Any], ...] = (*KINDS, DeadLetter, Ticket)
LETTERS = st.text(string.ascii_letters + string.digits + "_-", min_size=1, max_size=64)
INTEGERS = st.integers(-(2**63), 2**64 - 1)


# Values for every field of every message, out of its type


SAMPLES: dict[type[Any], Callable[[str], Any]] = {
    msgspec.inspect.StrType: lambda name: f"{name}-value",
    msgspec.inspect.IntType: lambda name: 1 + len(name) * 1000,
    msgspec.inspect.FloatType: lambda name: 0.5 + len(name),
    msgspec.inspect.BoolType: lambda name: name != "ordered_before_ready",
    msgspec.inspect.BytesType: lambda name: b"\x00\xff" + name.encode(),
}


def sample(info: Any, name: str, *, full: bool) -> Any:
    """A fixed value of that type; with `full`, one that differs from every default."""
    match info:
        case msgspec.inspect.LiteralType(values=values):
            value: Any = values[-1]
        case msgspec.inspect.ListType(item_type=item):
            value = [sample(item, name, full=full)] if full else []
        case msgspec.inspect.TupleType(item_types=items):
            value = tuple(sample(item, name, full=full) for item in items)
        case msgspec.inspect.DictType(key_type=keys, value_type=values):
            value = {sample(keys, name, full=full): sample(values, name, full=full)}
        case msgspec.inspect.UnionType(types=types):
            value = sample(next(t for t in types if not isinstance(t, msgspec.inspect.NoneType)), name, full=full)
        case msgspec.inspect.StructType(cls=cls):
            value = build(cls, full=full)
        case _:
            value = SAMPLES[type(info)](name)
    return value


def build(kind: type[Any], *, full: bool) -> Any:
    """An instance with every field filled, or with the required ones only."""
    info = msgspec.inspect.type_info(kind)
    assert isinstance(info, msgspec.inspect.StructType)
    return kind(**{f.name: sample(f.type, f.name, full=full) for f in info.fields if full or f.required})


SCALARS: dict[type[Any], st.SearchStrategy[Any]] = {
    msgspec.inspect.StrType: st.text(max_size=40),
    msgspec.inspect.IntType: INTEGERS,
    msgspec.inspect.FloatType: st.floats(allow_nan=False),
    msgspec.inspect.BoolType: st.booleans(),
    msgspec.inspect.BytesType: st.binary(max_size=40),
    msgspec.inspect.NoneType: st.none(),
}


def any_value(info: Any) -> st.SearchStrategy[Any]:
    """Every value that the type allows on the wire."""
    match info:
        case msgspec.inspect.LiteralType(values=values):
            strategy: st.SearchStrategy[Any] = st.sampled_from(values)
        case msgspec.inspect.ListType(item_type=item):
            strategy = st.lists(any_value(item), max_size=4)
        case msgspec.inspect.TupleType(item_types=items):
            strategy = st.tuples(*map(any_value, items))
        case msgspec.inspect.DictType(key_type=keys, value_type=values):
            strategy = st.dictionaries(any_value(keys), any_value(values), max_size=3)
        case msgspec.inspect.UnionType(types=types):
            strategy = st.one_of(*map(any_value, types))
        case msgspec.inspect.StructType(cls=cls):
            strategy = any_instance(cls)
        case _:
            strategy = SCALARS[type(info)]
    return strategy


def any_instance(kind: type[Any]) -> st.SearchStrategy[Any]:
    info = msgspec.inspect.type_info(kind)
    assert isinstance(info, msgspec.inspect.StructType)
    required = {f.name: any_value(f.type) for f in info.fields if f.required}
    optional = {f.name: any_value(f.type) for f in info.fields if not f.required}
    return st.fixed_dictionaries(required, optional=optional).map(lambda fields: kind(**fields))


ANY_MESSAGE = st.sampled_from(KINDS).flatmap(any_instance)


def write_missing_golden_files() -> None:
    """One minimal and one full instance of every kind that has no golden bytes yet."""
    for kind in EVERY_STRUCT:
        for number, full in ((1, False), (2, True)):
            path = GOLDEN / f"{kind.__name__}.{number}.bin"
            if not path.exists():
                message = build(kind, full=full)
                path.write_bytes(msgspec.msgpack.encode(message))
                path.with_suffix(".json").write_bytes(msgspec.json.format(msgspec.json.encode(message), indent=1))


# Golden bytes


def kind_of(path: Path) -> type[Any]:
    return {kind.__name__: kind for kind in EVERY_STRUCT}[path.name.split(".")[0]]


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.bin")), ids=lambda path: path.stem)
def test_golden_bytes_decode_for_ever_and_mean_the_same(path: Path) -> None:
    kind = kind_of(path)
    meant = msgspec.json.decode(path.with_suffix(".json").read_bytes(), type=kind)
    assert msgspec.msgpack.decode(path.read_bytes(), type=kind) == meant
    if kind in KINDS:
        assert decode(path.read_bytes()) == meant


@pytest.mark.parametrize("kind", EVERY_STRUCT, ids=lambda kind: kind.__name__)
def test_every_kind_has_golden_bytes_minimal_and_full(kind: type[Any]) -> None:
    assert [(GOLDEN / f"{kind.__name__}.{n}.bin").exists() for n in (1, 2)] == [True, True]
    full = msgspec.msgpack.decode((GOLDEN / f"{kind.__name__}.2.bin").read_bytes())
    assert set(full) - {"type"} <= {field.name for field in msgspec.structs.fields(kind)}


# Bytes


@given(message=ANY_MESSAGE)
def test_every_message_comes_back_as_it_was(message: Message) -> None:
    assert decode(encode(message)) == message


@given(message=ANY_MESSAGE, name=st.text(min_size=1), value=st.none() | st.text() | st.lists(INTEGERS))
def test_unknown_fields_are_ignored(message: Message, name: str, value: Any) -> None:
    fields = msgspec.msgpack.decode(encode(message))
    assert decode(msgspec.msgpack.encode({f"x_{name}": value} | fields)) == message


@given(data=st.binary(max_size=200))
def test_garbage_is_refused_and_nothing_else_is_raised(data: bytes) -> None:
    with pytest.raises(UndecodableError):
        decode(b"\xc1" + data)
    with contextlib.suppress(UndecodableError):
        decode(data)


@given(message=ANY_MESSAGE, data=st.data())
def test_a_spoilt_message_is_a_message_or_refused(message: Message, data: st.DataObject) -> None:
    spoilt = bytearray(encode(message))
    spoilt[data.draw(st.integers(0, len(spoilt) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(UndecodableError):
        assert isinstance(decode(bytes(spoilt)), Message)


@pytest.mark.parametrize(
    "data",
    [
        msgspec.msgpack.encode({"type": "BlocksStolen", "transfer_id": "a"}),
        msgspec.msgpack.encode({"transfer_id": "a", "reason": "no type"}),
        msgspec.msgpack.encode({"type": "CancelOrdered", "reason": "no key"}),
        msgspec.msgpack.encode({"type": "CancelOrdered", "transfer_id": 7, "reason": "wrong type"}),
        msgspec.msgpack.encode(["CancelOrdered", "a", "an array"]),
        msgspec.msgpack.encode({"type": "CancelOrdered", "transfer_id": "a", "reason": "cut short"})[:-3],
        b"",
        b"\xa1\xff",
        b"\x91" * 100_000,
    ],
)
def test_unknown_types_and_malformed_messages_are_undecodable(data: bytes) -> None:
    with pytest.raises(UndecodableError):
        decode(data)


def test_a_message_over_the_limit_is_the_senders_error_and_names_kind_and_size() -> None:
    with pytest.raises(MessageTooLargeError, match=r"a CancelOrdered of \d+ bytes is over the bus's limit of 262144"):
        encode(CancelOrdered(transfer_id="a", reason="x" * MESSAGE_BYTES_MAX))


def test_a_message_of_exactly_the_limit_is_sent() -> None:
    spare = MESSAGE_BYTES_MAX - len(encode(CancelOrdered(transfer_id="a", reason="x" * 70_000)))
    assert len(encode(CancelOrdered(transfer_id="a", reason="x" * (70_000 + spare)))) == MESSAGE_BYTES_MAX


def test_messages_are_maps_tagged_by_type_without_what_is_default() -> None:
    fields = {"type": "CancelOrdered", "transfer_id": "a", "reason": "b"}
    assert msgspec.msgpack.decode(encode(CancelOrdered(transfer_id="a", reason="b"))) == fields


# Subjects


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_subject_has_the_same_grammar(kind: type[Message]) -> None:
    subject = subjects.subject_of(build(kind, full=True), sender="me", to="you")
    root, version, plane, event, sender, to, key = subject.split(".")
    assert (root, version, plane, sender, to) == ("kvbus", "v1", kind.PLANE, "me", "you")
    assert event == subjects.event_of(kind)
    assert key == build(kind, full=True).key


def test_no_two_kinds_share_an_event() -> None:
    assert len({(kind.PLANE, subjects.event_of(kind)) for kind in KINDS}) == len(KINDS)


@given(name=LETTERS)
def test_letters_digits_dash_and_underscore_stand_in_a_subject(name: str) -> None:
    assert subjects.token(name) == name


@pytest.mark.parametrize("name", ["", "a.b", "a*", ">", "a b", "ä", "a" * 65, "a\n", "a/b", "$KV"])
def test_what_would_change_a_subject_is_refused(name: str) -> None:
    with pytest.raises(subjects.SubjectTokenError, match="cannot stand in a subject"):
        subjects.token(name)


def test_subscriptions_are_of_the_same_grammar() -> None:
    assert subjects.of_kind(PushDone, to="d0") == "kvbus.v1.transfer.push_done.*.d0.*"
    assert subjects.addressed_to("d0", "transfer") == "kvbus.v1.transfer.*.*.d0.*"
    assert subjects.everything_about("abc") == "kvbus.v1.*.*.*.*.abc"
    assert subjects.spoken_by("d0") == "kvbus.v1.*.*.d0.>"
    assert subjects.event_of(BlocksRegistered) == "blocks_registered"


# The ticket


def ticket(**changes: Any) -> Ticket:
    fields: dict[str, Any] = {"transfer_id": "a" * 32, "role": "produce", "mode": "early", "producer_id": "p0"}
    return Ticket(**(fields | changes))


def test_a_ticket_survives_the_json_of_both_legs() -> None:
    params = json.loads(json.dumps(build(Ticket, full=True).to_params()))
    assert ticket_from_params(params) == build(Ticket, full=True)


@given(params=st.recursive(st.none() | st.text() | INTEGERS, lambda x: st.dictionaries(st.text(), x) | st.lists(x)))
def test_a_malformed_ticket_is_a_ticket_error_and_nothing_else(params: Any) -> None:
    assert ticket_from_params(params) is None
    with pytest.raises(TicketError, match="malformed ticket"):
        ticket_from_params({"kvbus": params})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"version": 2}, "version 2"),
        ({"deadline_s": 0.0}, "has expired"),
        ({"deadline_s": float("nan")}, "has expired"),
        ({"deadline_s": 4000.0}, "at most 3600"),
        ({"transfer_id": "A" * 32}, "32 lower-case"),
        ({"transfer_id": "a"}, "32 lower-case"),
        ({"producer_id": "p1"}, "is for engine 'p1', this is 'p0'"),
        ({"producer_incarnation": "0"}, "the engine was restarted"),
    ],
)
def test_a_ticket_that_cannot_be_honoured_says_why(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(TicketError, match=text):
        ticket(**changes).check("p0", "1")


def test_a_ticket_for_this_engine_is_honoured() -> None:
    ticket(producer_incarnation="1").check("p0", "1")
    ticket(role="consume", consumer_id="d0").check("d0", "anything")


if __name__ == "__main__":
    write_missing_golden_files()

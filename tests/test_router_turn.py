"""What becomes of a claim: every path ends it once, and tells its holder when nobody takes it."""

from typing import Any

import pytest

from kvbus.router.door import Door
from kvbus.router.fleet import Engine
from kvbus.router.settings import RouterSettings
from kvbus.router.turn import Turn
from kvbus_schemas import Mode, Post, ReuseAnswered, ReuseGrant, ReuseReleased

KEY = "c" * 32
GRANT = ReuseGrant(
    transfer_id="0" * 32,
    offer_id="o",
    holder_id="d",
    holder_incarnation="d1",
    conversation=KEY,
    token_count=96,
    block_size=16,
    chain=[],
)
PREFILL = Engine(engine_id="p", role="prefill", http_url="", incarnation="p1", compat_hash="x")


def holder(**given: Any) -> Engine:
    return Engine(
        **({"engine_id": "d", "role": "decode", "http_url": "", "incarnation": "d1", "compat_hash": "x"} | given)
    )


def granted() -> Turn:
    turn = Turn(KEY)
    turn.answered(ReuseAnswered(conversation=KEY, grant=GRANT))
    return turn


def released(reason: str) -> tuple[Post, ...]:
    message = ReuseReleased(conversation=KEY, offer_id="o", transfer_id="0" * 32, reason=reason)
    return (Post("d", message),)


def test_a_request_without_a_conversation_says_disabled() -> None:
    turn = Turn()
    assert turn.said == "miss reason=disabled"
    assert turn.let_go("x") == turn.reported(None) == turn.bind("early", PREFILL, None) == ()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (ReuseAnswered(conversation=KEY, miss="expired"), "expired"),
        (ReuseAnswered(conversation=KEY), "unavailable"),
    ],
)
def test_a_miss_says_why(answer: ReuseAnswered, reason: str) -> None:
    turn = Turn(KEY)
    turn.answered(answer)
    assert (turn.said, turn.is_open, turn.grant) == (f"miss reason={reason}", False, None)


def test_a_grant_counts_as_granted_until_prefill_says_otherwise() -> None:
    turn = granted()
    assert turn.bind("early", PREFILL, holder()) == ()
    assert (turn.said, turn.is_open, turn.grant) == ("hit tokens=96", True, GRANT)
    assert turn.reported(b'{"kvbus": {"reused_tokens": 64, "reuse": "hit"}}') == ()
    assert (turn.said, turn.is_open) == ("hit tokens=64", False)
    assert turn.let_go("late") == ()
    assert turn.said == "hit tokens=64"


@pytest.mark.parametrize(
    ("mode", "prefill", "held_by", "reason"),
    [
        ("local", None, holder(), "local"),
        ("pull", PREFILL, holder(), "disabled"),
        ("early", PREFILL, None, "engine_gone"),
        ("early", PREFILL, holder(incarnation="d2"), "engine_gone"),
        ("deferred", PREFILL, holder(compat_hash="y"), "incompatible"),
    ],
)
def test_a_dispatch_that_cannot_use_it_lets_it_go(
    mode: Mode, prefill: Engine | None, held_by: Engine | None, reason: str
) -> None:
    turn = granted()
    assert turn.bind(mode, prefill, held_by) == released(reason)
    assert (turn.said, turn.grant, turn.is_open) == (f"miss reason={reason}", None, False)
    assert turn.bind(mode, prefill, held_by) == turn.let_go("again") == ()


@pytest.mark.parametrize(
    "params", [None, b"", b"[]", b'{"kvbus": null}', b'{"kvbus": {"reused_tokens": "x"}}', b"\xff"]
)
def test_an_answer_that_says_nothing_of_the_claim_lets_it_go(params: bytes | None) -> None:
    turn = granted()
    assert turn.reported(params) == released("unavailable")
    assert turn.said == "miss reason=unavailable"


def test_an_engines_words_cannot_break_the_header() -> None:
    turn = granted()
    turn.reported(b'{"kvbus": {"reused_tokens": -5, "reuse": "No\\r\\nx: y!' + b"z" * 99 + b'"}}')
    assert turn.said == "miss reason=no_x_y_" + "z" * 25


@pytest.mark.parametrize(
    ("headers", "tenant"),
    [
        ([], ""),
        ([(b"authorization", b"Bearer k")], "key bearer k"),
        ([(b"authorization", b"bearer   k ")], "key bearer k"),
        ([(b"authorization", b"Basic k")], "key basic k"),
        ([(b"authorization", b"Bearer k"), (b"x-t", b"one")], "header one"),
        ([(b"x-t", b"")], "header "),
    ],
)
def test_tenants_are_told_apart(headers: list[tuple[bytes, bytes]], tenant: str) -> None:
    door = Door(RouterSettings(tenant_header="X-T"))
    assert door.tenant_of(headers) == tenant

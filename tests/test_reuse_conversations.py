"""Which conversation a request belongs to: where its id is found, and keys that never meet."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus.conversations import conversation_key, conversation_of, key_of_request, leading_messages_key
from kvbus.reuse.core import is_key
from kvbus_schemas.subjects import everything_about

SECRET = b"s" * 32
HEADERS = [(b"host", b"x"), (b"x-conversation-id", b"from-header")]
ALL = {"conversation_id": "a", "prompt_cache_key": "b", "conversation": {"id": "c"}}
HOSTILE = ["", "*", ">", "a.b.c", "kvbus.v1.>", "\x00\r\n\t", "x" * 10_240, "\U0001f600", "\ud800", " ", "é" * 5000]


@pytest.mark.parametrize("tenant", ["", "tenant", "*", "\x00", "t" * 10_240])
@pytest.mark.parametrize("conversation_id", HOSTILE)
def test_any_tenant_and_any_id_make_a_key_that_can_stand_in_a_subject(tenant: str, conversation_id: str) -> None:
    key = conversation_key(tenant, conversation_id, SECRET)
    assert is_key(key)
    assert everything_about(key).endswith(key)


TEXT = st.text(alphabet=st.characters(exclude_categories=()), max_size=30)


@given(TEXT, TEXT, TEXT, TEXT)
def test_no_two_pairs_of_tenant_and_id_share_a_key(tenant: str, name: str, tenant2: str, name2: str) -> None:
    same = (tenant, name) == (tenant2, name2)
    assert (conversation_key(tenant, name, SECRET) == conversation_key(tenant2, name2, SECRET)) == same


def test_text_that_moves_between_tenant_and_id_makes_another_key() -> None:
    assert len({conversation_key("abcd"[:cut], "abcd"[cut:], SECRET) for cut in range(5)}) == 5


def test_keys_need_the_secret_whatever_its_length() -> None:
    assert len({conversation_key("t", "c", secret) for secret in (b"1", b"2", b"1" * 64, b"1" * 65, b"1" * 200)}) == 5
    with pytest.raises(ValueError, match="secret"):
        conversation_key("t", "c", b"")


def test_the_id_is_taken_from_the_first_place_that_has_one() -> None:
    body = dict(ALL)
    assert conversation_of(body, HEADERS) == ("conversation_id", "a")
    del body["conversation_id"]
    assert conversation_of(body, HEADERS) == ("x-conversation-id", "from-header")
    assert conversation_of(body, []) == ("prompt_cache_key", "b")
    del body["prompt_cache_key"]
    assert conversation_of(body, []) == ("conversation", "c")
    assert conversation_of({"conversation": "plain"}, []) == ("conversation", "plain")
    assert conversation_of({}, []) is None


@pytest.mark.parametrize("value", [None, "", [], {}, True, False, 1.5, ["a"], {"id": None}, {"id": ""}, {"id": ["x"]}])
def test_what_is_no_id_is_passed_over(value: Any) -> None:
    for name in ("conversation_id", "prompt_cache_key", "conversation"):
        assert conversation_of({name: value}, []) is None
    assert conversation_of({"conversation_id": value, "prompt_cache_key": "b"}, []) == ("prompt_cache_key", "b")
    assert conversation_of({"conversation_id": 17}, []) == ("conversation_id", "17")


def test_undecoded_bodies_are_read_as_decoded_ones_and_broken_text_is_passed_over() -> None:
    raw = msgspec.json.decode(json.dumps(ALL).encode(), type=dict[str, msgspec.Raw])
    assert conversation_of(raw, []) == conversation_of(ALL, [])
    for broken in (b'"\\ud800"', b"[" * 100_000, b'"\xff"', b""):
        assert conversation_of({"conversation_id": msgspec.Raw(broken)}, []) is None
        assert leading_messages_key("t", "m", {"messages": msgspec.Raw(broken)}, SECRET) is None


def test_headers_may_hold_any_bytes() -> None:
    found = {conversation_of({}, [(b"x-conversation-id", value)]) for value in (b"\xff", b"\xfe", b"a.b", b"\x01")}
    assert len(found) == 4
    for one in found:
        assert one is not None
        assert is_key(conversation_key("t", one[1], SECRET))
    assert conversation_of({}, [(b"x-conversation-id", "é".encode())]) == ("x-conversation-id", "é")


SYSTEM = {"role": "system", "content": "be brief"}
FIRST = {"role": "user", "content": "hello"}
REST = [{"role": "assistant", "content": "hi"}, {"role": "user", "content": "and now?"}]


def leading(tenant: str = "t", model: str = "m", **body: Any) -> str | None:
    return leading_messages_key(tenant, model, body, SECRET)


def test_all_turns_of_a_dialogue_have_the_same_leading_messages() -> None:
    first = leading(messages=[SYSTEM, FIRST])
    assert first is not None
    assert leading(messages=[SYSTEM, FIRST, *REST]) == first
    reordered = [{"content": "be brief", "role": "system"}, FIRST]
    assert leading(messages=reordered) == first
    raw = msgspec.json.decode(json.dumps({"messages": [SYSTEM, FIRST]}, indent=1), type=dict[str, msgspec.Raw])
    assert leading_messages_key("t", "m", raw, SECRET) == first


def test_another_beginning_model_tenant_or_set_of_tools_is_another_conversation() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    keys = [
        leading(messages=[SYSTEM, FIRST]),
        leading(messages=[FIRST]),
        leading(messages=[SYSTEM, {"role": "user", "content": "hello!"}]),
        leading(messages=[SYSTEM, FIRST], tools=[tool]),
        leading(model="other", messages=[SYSTEM, FIRST]),
        leading(tenant="other", messages=[SYSTEM, FIRST]),
    ]
    assert None not in keys
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("messages", [None, [], "text", [SYSTEM], [None, 1, "x"], {"role": "user"}])
def test_without_a_message_of_the_user_there_is_nothing_to_recognise(messages: Any) -> None:
    assert leading(messages=messages) is None


def test_an_id_and_leading_messages_never_meet_and_the_latter_can_be_switched_off() -> None:
    body = {"messages": [SYSTEM, FIRST]}
    found = key_of_request("t", "m", body, [], SECRET)
    assert found == ("leading_messages", leading(messages=[SYSTEM, FIRST]))
    assert key_of_request("t", "m", body, [], SECRET, by_messages=False) is None
    by_id = key_of_request("t", "m", body | {"conversation_id": "x"}, [], SECRET)
    assert by_id == ("conversation_id", conversation_key("t", "x", SECRET))

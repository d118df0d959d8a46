"""What each leg is sent: the same prompt, one token for prefill, everything for decode."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus.router.bodies import (
    DROPPED_FOR_PREFILL,
    PARAMS,
    Kind,
    decode_body,
    params_of,
    prefill_body,
    read,
    read_other,
)
from kvbus.router.problems import BadRequestError, error_event, error_json

TICKET = b'{"kvbus":{"transfer_id":"0"}}'

CHANGES_THE_PROMPT = {
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [{"type": "function"}],
    "tool_choice": "auto",
    "response_format": {"type": "json_object"},
    "chat_template": "{{ x }}",
    "chat_template_kwargs": {"enable_thinking": False},
    "add_generation_prompt": True,
    "continue_final_message": False,
    "add_special_tokens": False,
    "documents": [{"text": "d"}],
    "reasoning_effort": "low",
    "truncate_prompt_tokens": 5,
    "mm_processor_kwargs": {"a": 1},
    "cache_salt": "s",
    "model": "m",
    "priority": 3,
    "user": "u",
    "a_field_of_the_future": [1, 2],
}


def prefilled(kind: Kind, **body: Any) -> dict[str, Any]:
    asked = read(kind, json.dumps(body).encode())
    result: dict[str, Any] = json.loads(prefill_body(asked, TICKET))
    return result


def test_prefill_keeps_whatever_may_change_the_prompt() -> None:
    sent = prefilled("chat", **CHANGES_THE_PROMPT)
    assert {name: sent[name] for name in CHANGES_THE_PROMPT} == CHANGES_THE_PROMPT
    assert not DROPPED_FOR_PREFILL & CHANGES_THE_PROMPT.keys()


def test_prefill_computes_one_token_and_does_not_stream() -> None:
    asked = dict.fromkeys(DROPPED_FOR_PREFILL - {"best_of", "prompt_logprobs", "echo"}, 3)
    sent = prefilled("completions", prompt="a", max_tokens=99, stream=True, n=4, **asked)
    assert sent == {"prompt": "a", "max_tokens": 1, "stream": False, "n": 1, PARAMS: json.loads(TICKET)}


@pytest.mark.parametrize(
    ("kind", "body", "expected"),
    [
        ("chat", {}, {"max_tokens": 1, "max_completion_tokens": 1}),
        ("chat", {"max_completion_tokens": 9}, {"max_tokens": 1, "max_completion_tokens": 1}),
        ("completions", {"max_completion_tokens": 9}, {"max_tokens": 1, "max_completion_tokens": 1}),
        ("completions", {}, {"max_tokens": 1}),
    ],
)
def test_every_limit_on_tokens_is_one(kind: Kind, body: dict[str, Any], expected: dict[str, int]) -> None:
    assert {name: value for name, value in prefilled(kind, **body).items() if "tokens" in name} == expected


@pytest.mark.parametrize("raw", [b'{"prompt":"a"}', b' {"prompt" : "\\u00e9" , "x": 1e5 }\r\n', b"{}", b"{ }"])
def test_decode_gets_the_clients_own_bytes_and_the_ticket(raw: bytes) -> None:
    sent = decode_body(read("completions", raw), TICKET)
    assert sent.startswith(raw.rstrip()[:-1])
    assert json.loads(sent) == json.loads(raw) | {PARAMS: json.loads(TICKET)}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(
    st.dictionaries(
        st.text().filter(lambda name: name not in {PARAMS, "vllm_xargs", "model", "prompt", "n"}), JSON, max_size=5
    )
)
def test_any_object_survives_both_legs(body: dict[str, Any]) -> None:
    asked = read("completions", json.dumps(body).encode())
    assert json.loads(decode_body(asked, TICKET)) == body | {PARAMS: json.loads(TICKET)}
    sent = json.loads(prefill_body(asked, TICKET))
    replaced = {"max_tokens", "max_completion_tokens", "stream"} | DROPPED_FOR_PREFILL
    assert {k: v for k, v in sent.items() if k not in replaced | {PARAMS}} == {
        k: v for k, v in body.items() if k not in replaced
    }


@given(st.binary(max_size=50))
def test_any_bytes_are_read_or_refused_with_400(raw: bytes) -> None:
    try:
        read("chat", raw)
    except BadRequestError as problem:
        assert problem.status == 400  # noqa: PT017


@pytest.mark.parametrize(
    ("prompt", "parts"),
    [
        ("one", 1),
        (["one"], 1),
        (["one", "two", "three"], 3),
        ([1, 2, 3], 1),
        ([[1, 2], [3]], 2),
        ([], 1),
        (None, 1),
    ],
)
def test_a_list_of_prompts_has_a_part_for_each(prompt: object, parts: int) -> None:
    assert read("completions", json.dumps({"prompt": prompt}).encode()).parts == parts


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({}, ""),
        ({"logprobs": 2, "echo": False, "best_of": 1, "n": 3, "truncate_prompt_tokens": 9}, ""),
        ({"echo": True}, ""),
        ({"prompt_logprobs": None, "use_beam_search": False, "prompt_embeds": None}, ""),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 0}, "echo_of_scores"),
        ({"echo": True, "max_tokens": 0}, "echo_of_scores"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"best_of": 2}, "best_of"),
        ({"truncate_prompt_tokens": -1}, "truncate_prompt_tokens"),
    ],
)
def test_what_cannot_be_split_says_why(body: dict[str, Any], reason: str) -> None:
    assert read("completions", json.dumps(body).encode()).local_reason == reason


def test_what_is_not_json_is_forwarded_as_it_is() -> None:
    for raw in (b"", b"\x00\x01", b"{broken", b"[1]"):
        assert read_other(raw).body == raw
    assert read_other(b'{"model": "m"}').model == "m"


@pytest.mark.parametrize(
    ("answer", "params"),
    [
        (b'{"kv_transfer_params": {"a": [1]}}', b'{"a": [1]}'),
        (b'{"kv_transfer_params": null}', None),
        (b"{}", None),
        (b"no json", None),
    ],
)
def test_what_prefill_left_is_taken_from_its_answer(answer: bytes, params: bytes | None) -> None:
    assert params_of(answer) == params


def test_errors_are_openais_and_an_event_is_one_line() -> None:
    assert msgspec.json.decode(error_json(503, "c", "m\n")) == {
        "error": {"message": "m\n", "type": "server_error", "code": "c"}
    }
    event = error_event(502, "c", "two\nlines")
    assert event.startswith(b"data: {")
    assert event.count(b"\n") == 2

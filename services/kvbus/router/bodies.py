"""Request bodies: what a client asked for, and what each leg is sent. Pure.

Only the top level of a body is decoded; every value stays the bytes that the client sent. The decode leg's body is the
client's own with one member spliced in before its last brace, so that it costs a copy and no serialisation.
"""

import contextlib
from typing import Literal

import msgspec

from kvbus.router.problems import BadRequestError

Kind = Literal["completions", "chat", "other"]

PARAMS = "kv_transfer_params"

PULL_PARAMS = msgspec.json.encode(
    {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
)
"""What vLLM's pull connector wants to see on a prefill leg (vllm-kv-transfer.md section 1.8)."""

DROPPED_FOR_PREFILL = frozenset(
    (
        "stream_options",
        "stream_interval",
        "min_tokens",
        "best_of",
        "logprobs",
        "top_logprobs",
        "prompt_logprobs",
        "logprob_token_ids",
        "echo",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "return_prompt_text",
        "return_token_offsets",
        "structured_outputs",
        "repetition_detection",
        "stop",
        "suffix",
    )
)
"""Fields that shape the answer only. All else stays, known or not: it may change the prompt (messages, tools,
tool_choice, response_format, chat_template, chat_template_kwargs, documents, reasoning_effort, cache_salt, ...)."""

_NOTHING = (b"null", b"false", b"0", b"")
_ONE = msgspec.Raw(b"1")
_FALSE = msgspec.Raw(b"false")

_members = msgspec.json.Decoder(dict[str, msgspec.Raw])
_strings = msgspec.json.Decoder(str)
_items = msgspec.json.Decoder(list[msgspec.Raw])
_encoder = msgspec.json.Encoder()


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What a body asks for, as far as a router has to know."""

    kind: Kind
    body: bytes
    members: dict[str, msgspec.Raw]
    model: str
    """Empty where the client leaves it to the engine."""
    parts: int
    """Prompts in the request."""
    single: bool
    """One prompt, one answer: what stock engines can hand over."""
    local_reason: str
    """Why the request cannot be split between two engines; empty if it can."""


def read(kind: Kind, body: bytes) -> Asked:
    """Look into a client's body. Raises BadRequestError on what no engine could be sent."""
    try:
        members = _members.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequestError(f"the body must be one JSON object in UTF-8: {error}", code="malformed_body") from error
    _refuse_params(members)
    parts = _parts(members) if kind == "completions" else 1
    return Asked(
        kind=kind,
        body=body,
        members=members,
        model=_model(members),
        parts=parts,
        single=parts == 1 and bytes(members.get("n", b"1")) in {b"1", b"null"},
        local_reason=_local_reason(members),
    )


def read_other(body: bytes) -> Asked:
    """Any other request: forwarded as it is to one engine. Raises BadRequestError like `read`, as far as it is JSON."""
    members: dict[str, msgspec.Raw] = {}
    if body.lstrip()[:1] == b"{":
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            members = _members.decode(body)
    _refuse_params(members)
    return Asked(
        kind="other", body=body, members=members, model=_model(members), parts=1, single=True, local_reason="forwarded"
    )


def prefill_body(asked: Asked, params: bytes) -> bytes:
    """The prefill leg: the same prompt, one token, no stream. `params` is JSON for `kv_transfer_params`."""
    kept = {name: value for name, value in asked.members.items() if name not in DROPPED_FOR_PREFILL}
    kept["max_tokens"] = _ONE
    if asked.kind == "chat" or "max_completion_tokens" in kept:
        kept["max_completion_tokens"] = _ONE
    kept["stream"] = _FALSE
    if "n" in kept:
        kept["n"] = _ONE
    kept[PARAMS] = msgspec.Raw(params)
    return _encoder.encode(kept)


def decode_body(asked: Asked, params: bytes) -> bytes:
    """The decode leg: the client's own bytes, and `params` (JSON) as `kv_transfer_params`."""
    head = asked.body.rstrip()[:-1]
    comma = b"," if asked.members else b""
    return b'%b%b"%b":%b}' % (head, comma, PARAMS.encode(), params)


def params_of(answer: bytes) -> bytes | None:
    """The JSON of `kv_transfer_params` in an engine's answer; None where there is none."""
    try:
        params = _members.decode(answer).get(PARAMS)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return None if params is None or bytes(params) == b"null" else bytes(params)


def _refuse_params(members: dict[str, msgspec.Raw]) -> None:
    if _given(members, PARAMS):
        raise BadRequestError(
            f"{PARAMS} is the router's to set: leave it out, or send the request to an engine yourself",
            code="kv_transfer_params_refused",
        )
    extra = members.get("vllm_xargs")
    if extra is None or bytes(extra) == b"null":
        return
    try:
        names = _members.decode(extra)
    except msgspec.MsgspecError as error:
        raise BadRequestError(f"vllm_xargs must be a JSON object: {error}", code="malformed_body") from error
    if PARAMS in names:
        raise BadRequestError(f"vllm_xargs must not hold {PARAMS}", code="kv_transfer_params_refused")


def _model(members: dict[str, msgspec.Raw]) -> str:
    value = members.get("model")
    if value is None or bytes(value) == b"null":
        return ""
    try:
        return _strings.decode(value)
    except msgspec.MsgspecError as error:
        raise BadRequestError("model must be a string: GET /v1/models lists them", code="malformed_body") from error


def _parts(members: dict[str, msgspec.Raw]) -> int:
    """A list of strings or of token lists has one prompt per item; a string or a list of tokens is one."""
    prompt = bytes(members.get("prompt", b"null"))
    if not prompt.startswith(b"[") or prompt[1:].lstrip()[:1] not in {b'"', b"["}:
        return 1
    return max(1, len(_items.decode(prompt)))


def _given(members: dict[str, msgspec.Raw], name: str) -> bool:
    return name in members and bytes(members[name]) not in _NOTHING


def _local_reason(members: dict[str, msgspec.Raw]) -> str:
    """Features that need the prompt computed where the answer is, or that would cut the two prompts differently."""
    if bytes(members.get("prompt_logprobs", b"null")) != b"null":
        return "prompt_logprobs"
    if _given(members, "echo") and (_logprobs(members) or bytes(members.get("max_tokens", b"")) == b"0"):
        return "echo_of_scores"
    for name in ("use_beam_search", "prompt_embeds"):
        if _given(members, name):
            return name
    if bytes(members.get("best_of", b"null")) not in {b"null", b"1"}:
        return "best_of"
    if bytes(members.get("truncate_prompt_tokens", b"")).startswith(b"-"):
        return "truncate_prompt_tokens"  # "as far as fits" depends on max_tokens, which differs between the legs
    return ""


def _logprobs(members: dict[str, msgspec.Raw]) -> bool:
    return bytes(members.get("logprobs", b"null")) not in {b"null", b"false"}

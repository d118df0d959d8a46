"""Which conversation a request belongs to, and its key on the bus. Pure.

Ids are scoped by tenant and hashed under a secret that all routers share, so that no two tenants can meet and nothing
that a user has written reaches the bus. Any id will do: 10 kB, control characters, dots and wildcards are just bytes.
"""

from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any, Literal

import msgspec

Source = Literal["conversation_id", "x-conversation-id", "prompt_cache_key", "conversation", "leading_messages"]
"""Where an id was found, in the order of search; the last when there was none and the first messages stand for it."""

HEADER = b"x-conversation-id"
KEY_BYTES = 16
SECRET_BYTES_MAX = 64
"""What BLAKE2b takes as its key; a longer secret is hashed to this."""
LENGTH_BYTES = 8

_BY_ID = b"kvbus.id"
_BY_MESSAGES = b"kvbus.messages"
_DECODE_ERRORS = (msgspec.MsgspecError, UnicodeError, RecursionError)


def conversation_key(tenant: str, conversation_id: str, secret: bytes) -> str:
    """32 hexadecimal digits for a tenant's conversation. Raises ValueError when `secret` is empty.

    Every part goes in behind its own length, so that no two pairs of tenant and id give the same bytes.
    """
    return _digest(_BY_ID, secret, (_bytes_of(tenant), _bytes_of(conversation_id)))


def leading_messages_key(tenant: str, model: str, body: Mapping[str, Any], secret: bytes) -> str | None:
    """The key of a chat that has no id: digest of its messages up to the first of the user, and of its tools.

    Equal for all turns of a dialogue, and for two dialogues of a tenant that begin alike: of those one at a time
    reuses, up to the first difference. None where there are no such messages. Never equal to a key made from an id.
    """
    leading = _leading_messages(body)
    if leading is None:
        return None
    tools = _plain(body.get("tools"))
    try:
        parts = [msgspec.json.encode(part, order="sorted") for part in (*leading, tools)]
    except (TypeError, ValueError, RecursionError):
        return None
    return _digest(_BY_MESSAGES, secret, (_bytes_of(tenant), _bytes_of(model), *parts))


def conversation_of(body: Mapping[str, Any], headers: Iterable[tuple[bytes, bytes]]) -> tuple[Source, str] | None:
    """The conversation's id as the client gives it, and where it was: `conversation_id` in the body, the header
    X-Conversation-Id, `prompt_cache_key`, or OpenAI's `conversation` (a string, or an object with `id`).

    Values of `body` may be undecoded (msgspec.Raw); header names are in lower case. What is empty or no id (a list,
    a boolean, broken text) is passed over.
    """
    if found := _id_of(body.get("conversation_id")):
        return "conversation_id", found
    for name, value in headers:
        if name == HEADER and value:
            return "x-conversation-id", value.decode("utf-8", "surrogateescape")
    if found := _id_of(body.get("prompt_cache_key")):
        return "prompt_cache_key", found
    conversation = _plain(body.get("conversation"))
    if isinstance(conversation, Mapping):
        conversation = conversation.get("id")
    if found := _id_of(conversation):
        return "conversation", found
    return None


def key_of_request(
    tenant: str,
    model: str,
    body: Mapping[str, Any],
    headers: Iterable[tuple[bytes, bytes]],
    secret: bytes,
    *,
    by_messages: bool = True,
) -> tuple[Source, str] | None:
    """Where the conversation of a request was recognised, and its key; without an id by its leading messages, if
    `by_messages`. None: the request belongs to no conversation."""
    found = conversation_of(body, headers)
    if found is not None:
        return found[0], conversation_key(tenant, found[1], secret)
    key = leading_messages_key(tenant, model, body, secret) if by_messages else None
    return None if key is None else ("leading_messages", key)


def _leading_messages(body: Mapping[str, Any]) -> list[Any] | None:
    """All messages up to and with the first of the user, decoded; the rest is not looked at."""
    messages = body.get("messages")
    if isinstance(messages, msgspec.Raw):
        try:
            messages = msgspec.json.decode(messages, type=list[msgspec.Raw])
        except _DECODE_ERRORS:
            return None
    if not isinstance(messages, list):
        return None
    leading = []
    for raw in messages:
        message = _plain(raw)
        leading.append(message)
        if isinstance(message, Mapping) and message.get("role") == "user":
            return leading
    return None


def _plain(value: Any) -> Any:
    """The value, decoded if it is not yet; None when it cannot be."""
    if not isinstance(value, msgspec.Raw):
        return value
    try:
        return msgspec.json.decode(value)
    except _DECODE_ERRORS:
        return None


def _id_of(value: Any) -> str:
    value = _plain(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return value if isinstance(value, str) else ""


def _bytes_of(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _digest(purpose: bytes, secret: bytes, parts: Iterable[bytes]) -> str:
    if not secret:
        raise ValueError("conversations need a secret: without one anybody could compute their keys")
    key = secret if len(secret) <= SECRET_BYTES_MAX else blake2b(secret).digest()
    digest = blake2b(key=key, digest_size=KEY_BYTES, person=purpose)
    for part in parts:
        digest.update(len(part).to_bytes(LENGTH_BYTES, "big"))
        digest.update(part)
    return digest.hexdigest()

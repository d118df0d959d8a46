"""The bus in writing: JSON Schema and AsyncAPI, generated from the Structs, for programs in any language."""

import ast
import inspect
import json
import textwrap
from typing import Any

import msgspec

from kvbus_schemas import subjects
from kvbus_schemas.codec import KINDS, MESSAGE_BYTES_MAX
from kvbus_schemas.envelope import EVERYONE, Message
from kvbus_schemas.presence import DeadLetter, EngineCard
from kvbus_schemas.ticket import TICKET_KEY, Ticket

Json = dict[str, Any]

CONTENT_TYPE = "application/msgpack"
DIALECT = "https://json-schema.org/draft/2020-12/schema"

NAME_PATTERN = "[A-Za-z0-9_-]{1,64}"
"""What may stand in a subject as <from>, <to> and <key>."""

CHANNELS: tuple[type[msgspec.Struct], ...] = (*KINDS, DeadLetter)
"""What has a channel of its own."""

ROUTES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "EngineCard": (("engine",), ("router", "matcher", "reuse", "engine")),
    "LoadReported": (("engine",), ("router",)),
    "DrainOrdered": (("engine keeper", "operator"), ("engine",)),
    "RouteDecided": (("router",), ("observer",)),
    "RequestServed": (("router",), ("observer",)),
    "RouteAsked": (("router",), ("external router",)),
    "RouteAnswered": (("external router",), ("router",)),
    "BlocksRegistered": (("consumer",), ("matcher",)),
    "BlocksReady": (("producer",), ("matcher",)),
    "BlocksUnavailable": (("producer", "matcher"), ("matcher", "consumer", "producer")),
    "PushOrdered": (("matcher",), ("producer",)),
    "PushDone": (("producer",), ("consumer",)),
    "PushFailed": (("producer",), ("consumer",)),
    "TransferClosed": (("consumer",), ("producer", "matcher")),
    "CancelOrdered": (("router", "consumer", "matcher"), ("producer", "consumer", "matcher")),
    "PushQuiesced": (("producer",), ("consumer",)),
    "ReuseOffered": (("decode",), ("reuse",)),
    "ReuseAsked": (("router",), ("reuse",)),
    "ReuseAnswered": (("reuse",), ("router",)),
    "ReuseReleased": (("prefill",), ("decode",)),
    "ReuseWithdrawn": (("decode",), ("reuse",)),
    "BlocksStored": (("engine",), ("router",)),
    "BlocksRemoved": (("engine",), ("router",)),
    "CacheCleared": (("engine",), ("router",)),
    "CacheAsked": (("router",), ("engine",)),
    "PromptHashed": (("prefill",), ("router",)),
    "PromptMapped": (("router",), ("router",)),
    "DeadLetter": (("any",), ("observer",)),
}
"""Who says each message, and who listens. Producer and consumer are an engine's part in one transfer."""

BUCKETS: Json = {
    subjects.ENGINES_BUCKET: {
        "key": "engine_id",
        "value": "EngineCard",
        "ttl_s": 6,
        "description": "One card for each live engine, renewed every 2 s.",
    },
    subjects.CONVERSATIONS_BUCKET: {
        "key": "conversation",
        "value": "ReuseOffered",
        "ttl_s": 480,
        "description": "Where a conversation's blocks are; the lifetime is fixed and not renewed by reading.",
    },
    subjects.LEASES_BUCKET: {
        "key": "the process's part, for example matcher",
        "value": "The holder's name and incarnation, as UTF-8 text.",
        "ttl_s": 3,
        "description": "Which of several processes is the active one; renewed every second by compare-and-set.",
    },
}

PARAMETERS: Json = {
    "sender": {"description": "Stable name of the sender: an engine_id or a process name."},
    "to": {
        "description": f"Name of the receiver: an engine_id, a process name, `matcher`, `reuse`, or `{EVERYONE}` for "
        "whoever wants to know."
    },
    "key": {"description": "What the message is about: a transfer_id, a conversation, an engine_id or an ask_id."},
}


def text_of(document: Json) -> str:
    """The document as it is checked in."""
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def json_schema() -> Json:
    """JSON Schema of every message, of the dead letter and of the ticket."""
    components = _components("#/$defs/{name}")
    return {
        "$schema": DIALECT,
        "title": "kvbus messages",
        "description": "Messages travel as MessagePack maps with a field `type`; what has contentEncoding "
        "base64 here is MessagePack bin on the bus. Unknown fields must be ignored. The ticket travels in "
        f"JSON, in kv_transfer_params.{TICKET_KEY}.",
        "oneOf": [{"$ref": f"#/$defs/{kind.__name__}"} for kind in KINDS],
        "$defs": components,
    }


def asyncapi(version: str) -> Json:
    """AsyncAPI 3.0 of the whole bus: `version` is kvbus's own."""
    return {
        "asyncapi": "3.0.0",
        "info": {"title": "kvbus", "version": version, "description": _ABOUT, "license": {"name": "Apache-2.0"}},
        "defaultContentType": CONTENT_TYPE,
        "servers": {"nats": {"host": "localhost:4222", "protocol": "nats", "description": "NATS with JetStream."}},
        "channels": {kind.__name__: _channel(kind) for kind in CHANNELS},
        "operations": _operations(),
        "components": {
            "messages": {kind.__name__: _message(kind) for kind in CHANNELS},
            "parameters": PARAMETERS,
            "schemas": _components("#/components/schemas/{name}"),
        },
        "x-kvbus": {
            "grammar": f"{subjects.ROOT}.<plane>.<event>.<from>.<to>.<key>",
            "token": NAME_PATTERN,
            "message_bytes_max": MESSAGE_BYTES_MAX,
            "stream": {"name": subjects.TRACE_STREAM, "subjects": [subjects.everything()]},
            "buckets": BUCKETS,
            "ticket": {"key": f"kv_transfer_params.{TICKET_KEY}", "$ref": "#/components/schemas/Ticket"},
        },
    }


_ABOUT = (
    "The coordination plane for disaggregated vLLM serving. Every subject has the grammar "
    "`kvbus.v1.<plane>.<event>.<from>.<to>.<key>`, so that one subscription sees all that concerns one transfer "
    "(`kvbus.v1.*.*.*.*.<key>`). Messages are MessagePack maps of at most 256 KiB; prompts, tokens and tensors never "
    "travel here. Durations are what remained at the moment of sending."
)


def _channel(kind: type[msgspec.Struct]) -> Json:
    name = kind.__name__
    return {
        "address": _address(kind),
        "title": name,
        "description": _doc(kind),
        "messages": {name: {"$ref": f"#/components/messages/{name}"}},
        "parameters": {
            name: {"$ref": f"#/components/parameters/{name}"} for name in PARAMETERS if f"{{{name}}}" in _address(kind)
        },
    }


def _address(kind: type[msgspec.Struct]) -> str:
    if kind is EngineCard:
        return f"$KV.{subjects.ENGINES_BUCKET}.{{key}}"
    if not issubclass(kind, Message):
        return f"{subjects.DEAD_LETTERS}.{{sender}}"
    return f"{subjects.ROOT}.{kind.PLANE}.{subjects.event_of(kind)}.{{sender}}.{{to}}.{{key}}"


def _operations() -> Json:
    operations: Json = {}
    for kind in CHANNELS:
        senders, listeners = ROUTES[kind.__name__]
        for action, verb, parties in (("send", "says", senders), ("receive", "hears", listeners)):
            for party in parties:
                operations[f"{party.replace(' ', '_')}_{verb}_{kind.__name__}"] = _operation(kind, action, party)
    return operations


def _operation(kind: type[msgspec.Struct], action: str, party: str) -> Json:
    channel = f"#/channels/{kind.__name__}"
    return {
        "action": action,
        "channel": {"$ref": channel},
        "summary": f"{party} {'publishes' if action == 'send' else 'subscribes to'} {kind.__name__}",
        "tags": [{"name": party}],
        "messages": [{"$ref": f"{channel}/messages/{kind.__name__}"}],
    }


def _message(kind: type[msgspec.Struct]) -> Json:
    return {
        "name": kind.__name__,
        "title": kind.__name__,
        "summary": _doc(kind).split(". ")[0].rstrip(".") + ".",
        "contentType": CONTENT_TYPE,
        "payload": {"$ref": f"#/components/schemas/{kind.__name__}"},
    }


def _components(template: str) -> Json:
    """Schemas of all Structs, with the docstrings of their fields."""
    _, components = msgspec.json.schema_components([*CHANNELS, Ticket], ref_template=template)
    structs = _structs_of((*CHANNELS, Ticket))
    for name, schema in components.items():
        schema["description"] = _doc(structs[name])
        docs = field_docs(structs[name])
        for field, properties in schema["properties"].items():
            if field in docs:
                properties["description"] = docs[field]
        if "type" in schema["properties"]:
            schema["properties"]["type"]["description"] = "Which message this is."
    return dict(components)


def _structs_of(kinds: tuple[type[msgspec.Struct], ...]) -> dict[str, type[msgspec.Struct]]:
    """These Structs and all that occur inside their fields, by name."""
    found: dict[str, type[msgspec.Struct]] = {}
    waiting: list[Any] = [msgspec.inspect.type_info(kind) for kind in kinds]
    while waiting:
        info = waiting.pop()
        if isinstance(info, msgspec.inspect.StructType):
            found[info.cls.__name__] = info.cls
            waiting += [field.type for field in info.fields]
        elif isinstance(info, msgspec.inspect.UnionType):
            waiting += info.types
        elif isinstance(info, msgspec.inspect.ListType):
            waiting.append(info.item_type)
    return found


def field_docs(kind: type) -> dict[str, str]:
    """The docstrings that stand under a class's fields, those of its bases included."""
    docs: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.startswith(("kvbus_schemas", "kvbus.")):
            docs |= _own_field_docs(base)
    return docs


def _own_field_docs(kind: type) -> dict[str, str]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(tree, ast.ClassDef)
    docs: dict[str, str] = {}
    for field, text in zip(tree.body, tree.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
            and isinstance(text.value.value, str)
        ):
            docs[field.target.id] = _one_line(text.value.value)
    return docs


def _doc(kind: type) -> str:
    return _one_line(kind.__doc__ or "")


def _one_line(text: str) -> str:
    return " ".join(text.split())

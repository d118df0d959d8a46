"""What a router serves, as an OpenAPI 3.1 document. Pure.

It describes the router's own part: paths, headers, errors, and of the bodies what the router looks at. Engines take and
give more (`additionalProperties`), which is vLLM's to describe.
"""

from typing import Any

from kvbus.router.core import MODES

Json = dict[str, Any]

TEXT_MAX = 512
"""Longest value of a header that the document promises to take."""
ERRORS: dict[int, str] = {
    400: "The request is wrong: `malformed_body`, `model_missing`, `unknown_mode`, `mode_unavailable`, "
    "`kv_transfer_params_refused`, `bad_http`, `upgrade_refused`, or an engine's own refusal",
    401: "`invalid_api_key`: the router takes keys (`api_keys_file`)",
    404: "`model_not_found`, `not_found`",
    405: "`method_not_allowed`",
    408: "`request_timeout`: the request did not arrive in time",
    413: "`body_too_large`",
    422: "An engine's refusal of a body that does not fit",
    429: "`queue_full`: too many requests wait",
    431: "`headers_too_large`",
    500: "`internal_error`, `policy_failed`, or an engine's own error",
    502: "`engine_failed`: every allowed dispatch failed",
    503: "`no_decode_engine`, `wait_too_long`, `bus_lost`, `too_many_connections`",
    504: "`deadline_exceeded`",
}
_MAY_RETRY = (429, 503)
_METHOD = 405


def openapi(version: str) -> Json:
    """The document."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "kvbus router",
            "version": version,
            "description": "OpenAI's API before disaggregated vLLM engines. Any other path under /v1, and /tokenize, "
            "/detokenize and /version, is forwarded as it is to one decode engine.",
        },
        "security": [{}, {"bearer": []}],
        "paths": {
            "/v1/completions": {"post": _generate("createCompletion", "CompletionRequest", "Completion")},
            "/v1/chat/completions": {"post": _generate("createChatCompletion", "ChatRequest", "ChatCompletion")},
            "/v1/models": {"get": _page("listModels", "The models of all engines", _json("ModelList"), by_key=True)},
            "/health": {"get": _health()},
            "/metrics": {"get": _page("metrics", "Prometheus text", {"text/plain": {"schema": {"type": "string"}}})},
        },
        "components": {
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer", "description": "A key of `kvbus auth key add`"}
            },
            "headers": _headers(),
            "responses": {f"E{status}": _error(status, text) for status, text in ERRORS.items()},
            "schemas": _schemas(),
        },
    }


def _generate(name: str, request: str, answer: str) -> Json:
    stream: Json = {"text/event-stream": {}}
    return {
        "operationId": name,
        "parameters": _parameters(),
        "requestBody": {"required": True, "content": _json(request)},
        "responses": {
            "200": {
                "description": "The engine's answer, byte by byte. In a stream an engine that fails after the first "
                'byte is told as a last event `data: {"error": ...}`',
                "headers": {each: {"$ref": f"#/components/headers/{each}"} for each in _headers()},
                "content": _json(answer) | stream,
            },
        }
        | _errors(*ERRORS),
    }


def _page(name: str, text: str, content: Json, *, by_key: bool = False) -> Json:
    errors = (400, *((401,) if by_key else ()), 405, 408, 413, 431, 500, 503)
    return {
        "operationId": name,
        "responses": {"200": {"description": text, "content": content}} | _errors(*errors),
    } | ({} if by_key else {"security": []})


def _health() -> Json:
    page = _page("health", "An engine is there and NATS is reachable", _json("Health"))
    page["responses"]["503"] = {
        "description": "Not ready: `reasons` say why; or `too_many_connections`",
        "content": {"application/json": {"schema": {"anyOf": [_ref("Health"), _ref("Error")]}}},
    }
    return page


def _errors(*statuses: int) -> Json:
    return {str(status): {"$ref": f"#/components/responses/E{status}"} for status in statuses}


def _error(status: int, text: str) -> Json:
    found: Json = {"description": text, "content": _json("Error")}
    if status in _MAY_RETRY:
        found["headers"] = {"Retry-After": {"description": "Seconds", "schema": {"type": "string"}}}
    if status == _METHOD:
        found["headers"] = {"Allow": {"description": "What may be sent", "schema": {"type": "string"}}}
    return found


def _parameters() -> list[Json]:
    printable = {"type": "string", "pattern": "^[A-Za-z0-9._-]+$", "maxLength": TEXT_MAX}
    headers: dict[str, tuple[str, Json]] = {
        "X-Kvbus-Mode": ("The way of this request", {"type": "string", "enum": list(MODES)}),
        "X-Request-Id": ("Taken and given back, if it can stand in a log; else a fresh one", printable),
        "X-Conversation-Id": ("The conversation, if the body names none", printable),
        "traceparent": ("W3C trace context; what is no such thing is ignored", printable),
    }
    return [
        {"name": name, "in": "header", "description": text, "schema": schema}
        for name, (text, schema) in headers.items()
    ]


def _headers() -> Json:
    texts = {
        "X-Request-Id": "The client's, or the router's",
        "X-Kvbus-Mode": "How the request went",
        "X-Kvbus-Transfer": "The transfer's id: `kvbus trace show ID`",
        "X-Kvbus-Reuse": "`hit tokens=N`, or `miss reason=...`",
    }
    return {name: {"description": text, "schema": {"type": "string"}} for name, text in texts.items()}


def _schemas() -> Json:
    return {
        "Error": _object(
            {
                "error": _object(
                    {
                        "message": {"type": "string"},
                        "type": {"type": "string"},
                        "code": {"type": ["string", "integer", "null"]},
                    },
                    "message",
                )
            },
            "error",
        ),
        "CompletionRequest": _object(_PROMPT | _SHARED, "prompt"),
        "ChatRequest": _object(_MESSAGES | _SHARED, "messages"),
        "Completion": _object({"object": {"const": "text_completion"}, "choices": {"type": "array"}}, "choices"),
        "ChatCompletion": _object({"object": {"const": "chat.completion"}, "choices": {"type": "array"}}, "choices"),
        "ModelList": _object({"object": {"const": "list"}, "data": {"type": "array"}}, "object", "data"),
        "Health": _object(
            {
                "status": {"enum": ["ok", "unavailable"]},
                "reasons": {"type": "array", "items": {"type": "string"}},
                "nats": {"type": "boolean"},
                "engines": {"type": "object", "additionalProperties": {"type": "integer"}},
            },
            *("status", "reasons", "nats", "engines"),
        ),
    }


_TOKENS: Json = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 255}, "minItems": 1}
_TEXT: Json = {"type": "string", "minLength": 1}
_PROMPT: Json = {
    "prompt": {
        "description": "A text, token ids, or a list of either",
        "anyOf": [_TEXT, _TOKENS, *({"type": "array", "items": each, "minItems": 1} for each in (_TEXT, _TOKENS))],
    }
}
_MESSAGES: Json = {
    "messages": {
        "type": "array",
        "minItems": 1,
        "items": {
            "type": "object",
            "properties": {"role": {"enum": ["system", "user", "assistant"]}, "content": {"type": "string"}},
            "required": ["role", "content"],
        },
    }
}
_SHARED: Json = {
    "model": {"type": ["string", "null"], "description": "One of /v1/models; may be left out where there is one only"},
    "max_tokens": {"type": ["integer", "null"], "minimum": 1},
    "n": {"type": ["integer", "null"], "minimum": 1, "maximum": 128},
    "stream": {"type": ["boolean", "null"]},
    "temperature": {"type": ["number", "null"], "minimum": 0},
    "ignore_eos": {"type": "boolean"},
    "conversation_id": {"type": ["string", "integer"], "description": "The dialogue that this is a turn of"},
    "prompt_cache_key": {"type": "string"},
    "conversation": {"type": ["string", "object"]},
    "kv_transfer_params": {"type": "null", "description": "The router's to set: anything else is refused with 400"},
}


def _object(properties: Json, *required: str) -> Json:
    return {"type": "object", "properties": properties, "required": list(required)}


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _json(name: str) -> Json:
    return {"application/json": {"schema": _ref(name)}}

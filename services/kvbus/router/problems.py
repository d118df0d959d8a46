"""What the router tells a client when it cannot serve it: OpenAI's error JSON, a status, and what to do.

RouterProblem
├── BadRequestError   400, 404: the request is wrong
│   └── MethodError   405: says which methods are right
├── Unauthorized      401: no key, or no key of this router
├── BusyError         429, 503: not now; carries Retry-After
└── EngineFailed      502, 504: engines were tried and failed
"""

import msgspec

SERVER_FAULT = 500

_encoder = msgspec.json.Encoder()


class RouterProblem(Exception):  # noqa: N818  (the base of what a client is told)
    """An answer that the router gives by itself."""

    def __init__(self, message: str, *, status: int, code: str, retry_after_s: int = 0) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s


class BadRequestError(RouterProblem):
    """The client has to change its request."""

    def __init__(self, message: str, *, code: str, status: int = 400) -> None:
        super().__init__(message, status=status, code=code)


class MethodError(BadRequestError):
    """The client has to use another method."""

    def __init__(self, *allowed: str) -> None:
        super().__init__(f"send a {' or '.join(allowed)}", code="method_not_allowed", status=405)
        self.allow = ", ".join(allowed)


class Unauthorized(RouterProblem):
    """The client must say who it is."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=401, code="invalid_api_key")


class BusyError(RouterProblem):
    """The client may try again."""

    def __init__(self, message: str, *, code: str, status: int = 503, retry_after_s: int = 1) -> None:
        super().__init__(message, status=status, code=code, retry_after_s=retry_after_s)


class EngineFailed(RouterProblem):
    """Every allowed dispatch has failed."""

    def __init__(self, message: str, *, code: str = "engine_failed", status: int = 502) -> None:
        super().__init__(message, status=status, code=code)


_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    499: "client_closed_request",
}


def error_json(status: int, code: str, message: str) -> bytes:
    """The body of an error as OpenAI's clients expect it."""
    kind = _TYPES.get(status) or ("server_error" if status >= SERVER_FAULT else "invalid_request_error")
    return _encoder.encode({"error": {"message": message, "type": kind, "code": code}})


def error_event(status: int, code: str, message: str) -> bytes:
    """The error as the last event of a stream."""
    return b"data: %b\n\n" % error_json(status, code, message)

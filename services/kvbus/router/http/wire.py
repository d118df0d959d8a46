"""Bytes of HTTP/1.1 heads. Header names are lower case everywhere; values come from a parser that refuses CR and LF."""

import http
from collections.abc import Iterable

Headers = list[tuple[bytes, bytes]]

_HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"http2-settings",
        b"content-length",
        b"host",
        b"expect",
    )
)
"""Headers that end at this hop; Host and the framing are written anew for the next one."""

_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in http.HTTPStatus}


def end_to_end(headers: Headers, dropped: frozenset[bytes] = frozenset()) -> Headers:
    """The headers that travel on, without those of one hop, those that `connection` names, and `dropped`."""
    named: Iterable[bytes] = ()
    for name, value in headers:
        if name == b"connection" and value not in {b"keep-alive", b"close"}:
            named = {token.strip().lower() for token in value.split(b",")}
    return [
        header
        for header in headers
        if header[0] not in _HOP_BY_HOP and header[0] not in dropped and header[0] not in named
    ]


def request_head(method: bytes, target: bytes, host: bytes, headers: Headers, length: int | None) -> bytes:
    """A request's head; `length` is the body's in bytes, None where there is no body."""
    parts = [b"%b %b HTTP/1.1\r\nhost: %b\r\n" % (method, target, host)]
    parts += [b"%b: %b\r\n" % header for header in headers]
    parts.append(b"\r\n" if length is None else b"content-length: %d\r\n\r\n" % length)
    return b"".join(parts)


def response_head(status: int, headers: Headers, framing: bytes) -> bytes:
    """A response's head; `framing` is the whole header lines that say how the body ends."""
    line = _STATUS_LINES.get(status) or b"HTTP/1.1 %d Unknown\r\n" % status
    parts = [line]
    parts += [b"%b: %b\r\n" % header for header in headers]
    parts += (framing, b"\r\n")
    return b"".join(parts)

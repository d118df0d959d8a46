"""Headers as they travel through a proxy. Names are lower case; values come from a parser that refuses CR and LF."""

from collections.abc import Iterable

from multidict import CIMultiDict

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


def lowered(raw: Iterable[tuple[bytes, bytes]]) -> Headers:
    """A parser's headers, with their names in lower case."""
    return [(name.lower(), value) for name, value in raw]


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


def for_aiohttp(headers: Headers) -> CIMultiDict[str]:
    """The same headers as aiohttp takes them."""
    return CIMultiDict([(name.decode("latin-1"), _text(value)) for name, value in headers])


def _text(value: bytes) -> str:
    return value.decode("utf-8", "surrogateescape")

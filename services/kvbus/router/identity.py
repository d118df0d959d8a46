"""Who a request is: its id for people and traces, and its place in a W3C trace. Pure but for fresh ids."""

import random
import re
import secrets

import msgspec

from kvbus.router.http import Headers, end_to_end

_REQUEST_ID = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}")
_TRACEPARENT = re.compile(rb"00-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-([0-9a-f]{2})")
_OURS = frozenset(
    (
        b"x-request-id",
        b"traceparent",
        b"x-kvbus-mode",
        b"x-kvbus-transfer",
        b"x-kvbus-reuse",
        b"x-conversation-id",
        b"accept-encoding",
    )
)
"""Headers that a leg gets from the router, if at all. Answers stay uncompressed: an error event must fit in."""
_NOT_FROM_ENGINES = frozenset((b"x-request-id", b"x-kvbus-mode", b"x-kvbus-transfer", b"x-kvbus-reuse"))


_ids = random.Random(secrets.randbits(256))  # noqa: S311  (ids must differ, not be secret; os.urandom is a system call)


def fresh_id(digits: int = 32) -> str:
    """So many random lower-case hexadecimal digits."""
    return f"{_ids.getrandbits(4 * digits):0{digits}x}"


class Identity(msgspec.Struct, frozen=True):
    """`trace_id` and `span_id` are empty where the client sends no valid traceparent."""

    request_id: str
    trace_id: str
    span_id: str
    leg_headers: Headers
    """The client's headers as they go on to the engines."""


def identify(headers: Headers) -> Identity:
    """Read a client's headers; an id that could do harm in a header or a log is replaced by a fresh one."""
    request_id = traceparent = b""
    for name, value in headers:
        if name == b"x-request-id":
            request_id = value
        elif name == b"traceparent":
            traceparent = value
    if not _REQUEST_ID.fullmatch(request_id):
        request_id = fresh_id().encode()
    leg_headers = end_to_end(headers, _OURS)
    leg_headers.append((b"x-request-id", request_id))
    trace_id = span_id = ""
    found = _TRACEPARENT.fullmatch(traceparent)
    if found:
        trace_id, span_id = found[1].decode(), fresh_id(16)
        leg_headers.append((b"traceparent", b"00-%b-%b-%b" % (found[1], span_id.encode(), found[2])))
    return Identity(request_id.decode(), trace_id, span_id, leg_headers)


def answer_headers(engine_headers: Headers, own: Headers) -> Headers:
    """An engine's headers as they go on to the client, and the router's own."""
    return end_to_end(engine_headers, _NOT_FROM_ENGINES) + own

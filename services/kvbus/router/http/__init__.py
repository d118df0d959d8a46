"""HTTP/1.1 for a proxy, on aiohttp: a server without routes and a client that passes bytes on as they come.

A small face over a well-kept library. What it adds is what this proxy needs and aiohttp has no setting for: OpenAI's
error JSON for whatever is refused, a limit on the whole of the headers, one on the time that a request takes to arrive,
and one on connections. Nothing in here knows of engines, tickets or the bus.
`kvbus.bench.http_pairs` has the figures of the libraries that were compared.
"""

from kvbus.router.http.client import Exchange, LegError, Origin
from kvbus.router.http.messages import Reply, Request, ServerLimits
from kvbus.router.http.server import Server
from kvbus.router.http.wire import Headers, end_to_end

__all__ = [
    "Exchange",
    "Headers",
    "LegError",
    "Origin",
    "Reply",
    "Request",
    "Server",
    "ServerLimits",
    "end_to_end",
]

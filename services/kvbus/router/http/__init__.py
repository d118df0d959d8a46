"""HTTP/1.1 for a proxy: a server and a client as asyncio protocols over httptools, the parser that uvicorn uses.

They exist because a proxy's added latency is mostly its HTTP library's: `kvbus.bench.http_pairs` has the figures.
Nothing in here knows of engines, tickets or the bus.
"""

from kvbus.router.http.client import Origin
from kvbus.router.http.exchange import Exchange, LegError
from kvbus.router.http.server import Reply, Request, Server, ServerLimits
from kvbus.router.http.wire import Headers, end_to_end, request_head

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
    "request_head",
]

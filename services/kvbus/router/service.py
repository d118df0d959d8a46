"""The router process: wires bus, core and HTTP together, and says one line per request."""

import asyncio
import time
from collections.abc import Iterable

import structlog

from kvbus.bus import Bus
from kvbus.errors import ConfigError
from kvbus.router import bodies, policies
from kvbus.router.afterwards import Afterwards, Served
from kvbus.router.bodies import Asked
from kvbus.router.cache import Caching
from kvbus.router.cache_metrics import CacheMetrics
from kvbus.router.chooser import Chooser
from kvbus.router.core import CLIENT_LEFT_STATUS, MODES
from kvbus.router.door import Door
from kvbus.router.fleet import Engine, Fleet
from kvbus.router.gate import Gate
from kvbus.router.guest_metrics import GuestMetrics
from kvbus.router.guests import Guests
from kvbus.router.http import Origin, Reply, Request, Server, ServerLimits
from kvbus.router.identity import Identity, identify
from kvbus.router.metrics import Metrics
from kvbus.router.own import OwnPages
from kvbus.router.presence import Presence
from kvbus.router.problems import BadRequestError, MethodError, RouterProblem, error_json
from kvbus.router.reusing import Reuse
from kvbus.router.serving import Serving
from kvbus.router.settings import RouterSettings
from kvbus_schemas import Mode, Post

log = structlog.get_logger(__name__)

GENERATE: dict[bytes, bodies.Kind] = {b"/v1/completions": "completions", b"/v1/chat/completions": "chat"}
FORWARDED = frozenset((b"/tokenize", b"/detokenize", b"/version"))
JSON = (b"content-type", b"application/json")


class Router:
    """`start`, then `drain` or `close`. `url` is where it listens."""

    def __init__(self, settings: RouterSettings, *, name: str, incarnation: str, policy: policies.Policy | None = None):
        self.settings = settings
        self.name = name
        self.fleet = Fleet()
        self.chooser = Chooser(self.fleet, policy or policies.load(settings.policy))
        self.metrics = Metrics()
        self.gate = Gate(
            in_flight_max=settings.requests_in_flight_max,
            waiting_max=settings.requests_waiting_max,
            wait_max_s=settings.wait_max_s,
            retry_after_s=settings.retry_after_s,
        )
        self.presence = Presence(settings, self.fleet, name=name, incarnation=incarnation, replaced=self._replaced)
        self.presence.cancelled = self.metrics.cancelled
        self.door = Door(settings)
        self.reuse = Reuse(settings, self.door)
        self.guests = Guests(
            settings, self.chooser, GuestMetrics(self.metrics.registry), name=name, publish=self.presence.post
        )
        self.caching = Caching(settings, self.fleet, CacheMetrics(self.metrics.registry), self.presence.post)
        self.presence.joined = self._joined
        self.afterwards = Afterwards(self.metrics, self.presence.post)
        self.server = Server(self._handle, _limits(settings), error_json)
        self.own = OwnPages(self)
        self._origins: dict[str, Origin] = {}
        self._lingering: set[asyncio.Task[None]] = set()
        for number, pair in enumerate(settings.static_pairs, 1):
            for engine in static_engines(number, pair):
                self.fleet.add_static(engine)

    @property
    def url(self) -> str:
        """Where the router listens."""
        return f"http://{self.server.host}:{self.server.port}"

    async def start(self, *, shared_port: bool = False) -> None:
        """Join the bus and listen. Raises ConfigError when the port is taken."""
        await self.presence.start()
        try:
            await self.server.start(self.settings.host, self.settings.port, shared_port=shared_port)
        except OSError as error:
            await self.presence.close()
            raise ConfigError(
                f"cannot listen on {self.settings.host}:{self.settings.port} ({error.strerror}): choose another --port"
            ) from error
        log.info("router_ready", url=self.url, policy=self.chooser.policy.name, nats=self.presence.connected)

    async def drain(self) -> None:
        """Take no more, finish what runs for up to `drain_s`, then leave."""
        log.info("router_draining", in_flight=self.gate.in_flight)
        left = await self.server.drain(self.settings.drain_s)
        await self._leave()
        log.info("router_stopped", broken_off=left)

    async def close(self) -> None:
        """Leave now; running answers are broken off and their transfers cancelled."""
        await self.server.close()
        await self._leave()

    async def _leave(self) -> None:
        await self.afterwards.close()
        for task in list(self._lingering):
            task.cancel()
        await asyncio.gather(*self._lingering, return_exceptions=True)
        await self.guests.close()
        await self.caching.close()
        await self.reuse.close()
        await self.presence.close()
        for origin in self._origins.values():
            await origin.close()

    async def _joined(self, bus: Bus) -> None:
        await self.reuse.joined(bus)
        await self.guests.joined(bus)
        await self.caching.joined(bus)

    # For requests (serving.Parts)

    @property
    def bus_connected(self) -> bool:
        """True while NATS is reachable."""
        return self.presence.connected

    async def post(self, posts: Iterable[Post]) -> None:
        """Publish."""
        await self.presence.post(posts)

    def origin(self, url: str) -> Origin:
        """The connections to an engine."""
        origin = self._origins.get(url)
        if origin is None:
            origin = self._origins[url] = Origin(url, connect_timeout_s=self.settings.engine_connect_timeout_s)
        return origin

    def linger(self, task: "asyncio.Task[None]") -> None:
        """Let a prefill leg that has outlived its decode leg finish, for `prefill_linger_s`."""
        if task.done():
            return
        self._lingering.add(task)
        timer = asyncio.get_running_loop().call_later(self.settings.prefill_linger_s, task.cancel)
        task.add_done_callback(self._lingering.discard)
        task.add_done_callback(lambda _done: timer.cancel())

    def retried(self) -> None:
        """Count another dispatch."""
        self.metrics.retried()

    def _replaced(self, dead: Engine) -> None:
        """An engine has come back as another incarnation: what the old one still owes will never come."""
        origin = self._origins.pop(dead.http_url, None)
        if origin is not None:
            task = asyncio.create_task(origin.close(), name="origin-close")
            self._lingering.add(task)
            task.add_done_callback(self._lingering.discard)

    # HTTP

    async def _handle(self, request: Request, reply: Reply) -> None:
        try:
            await self._route(request, reply)
        except RouterProblem as problem:
            self._refuse(reply, problem, b"")
        except ConnectionError:
            raise  # the client has left
        except Exception:
            log.exception("request_crashed", path=request.path.decode(errors="replace"))
            raise

    async def _route(self, request: Request, reply: Reply) -> None:
        self.door.check(request)
        kind = GENERATE.get(request.path)
        if kind is not None:
            await self._generate(kind, request, reply)
        elif request.path in self.own.pages:
            await self.own.answer(request, reply)
        elif request.path.startswith(b"/v1/") or request.path in FORWARDED:
            await self._serve(bodies.read_other(request.body), None, identify(request.headers), request, reply)
        else:
            path = request.path.decode(errors="replace")
            raise BadRequestError(f"{path} is not served here: see /v1", code="not_found", status=404)

    async def _generate(self, kind: bodies.Kind, request: Request, reply: Reply) -> None:
        identity = identify(request.headers)
        try:
            if request.method != b"POST":
                raise MethodError("POST")
            mode = _mode(request)
            asked = bodies.read(kind, request.body)
        except RouterProblem as problem:
            self._refuse(reply, problem, identity.request_id.encode())
            self.metrics.count_request("none", problem.status, 0.0, 0.0)
            return
        await self._serve(asked, mode, identity, request, reply)

    async def _serve(self, asked: Asked, mode: Mode | None, identity: Identity, request: Request, reply: Reply) -> None:
        turn = self.reuse.turn_of(asked, request.headers)
        serving = Serving(self, request, reply, asked=asked, identity=identity, mode=mode, turn=turn)
        try:
            async with self.gate:
                await serving.run()
        except RouterProblem as problem:
            serving.result.status = problem.status
            serving.result.error = problem.message
            self._refuse(reply, problem, identity.request_id.encode())
        except (asyncio.CancelledError, ConnectionError):
            serving.result.outcome, serving.result.status = "cancelled", CLIENT_LEFT_STATUS
            raise
        finally:
            self._say(serving, asked, request)

    def _refuse(self, reply: Reply, problem: RouterProblem, request_id: bytes) -> None:
        headers = [JSON]
        if request_id:
            headers.append((b"x-request-id", request_id))
        if problem.retry_after_s:
            headers.append((b"retry-after", b"%d" % problem.retry_after_s))
        if isinstance(problem, MethodError):
            headers.append((b"allow", problem.allow.encode()))
        reply.whole(problem.status, headers, error_json(problem.status, problem.code, problem.message))

    def _say(self, serving: Serving, asked: Asked, request: Request) -> None:
        result = serving.result
        result.duration_s = time.monotonic() - request.arrived_s
        self.afterwards.add(Served(serving.identity.request_id, len(asked.body), serving.dispatch, result))


def _mode(request: Request) -> Mode | None:
    asked = request.header(b"x-kvbus-mode")
    if asked is None:
        return None
    for mode in MODES:
        if asked == mode.encode():
            return mode
    raise BadRequestError(f"X-Kvbus-Mode must be one of {', '.join(MODES)}", code="unknown_mode")


def _limits(settings: RouterSettings) -> ServerLimits:
    return ServerLimits(
        header_bytes_max=settings.header_bytes_max,
        body_bytes_max=settings.body_bytes_max,
        connections_max=settings.connections_max,
        idle_timeout_s=settings.idle_timeout_s,
        read_timeout_s=settings.read_timeout_s,
    )


def static_engines(number: int, pair: str) -> list[Engine]:
    """The engines of one `--static prefill=URL,decode=URL`. Raises ConfigError."""
    given = dict(part.partition("=")[::2] for part in pair.split(","))
    if set(given) != {"prefill", "decode"} or not all(url.startswith("http") for url in given.values()):
        raise ConfigError(f"--static {pair!r}: give prefill=http://host:port,decode=http://host:port")
    return [
        Engine(
            engine_id=f"static-prefill-{number}", role="prefill", http_url=given["prefill"].rstrip("/"), static=True
        ),
        Engine(engine_id=f"static-decode-{number}", role="decode", http_url=given["decode"].rstrip("/"), static=True),
    ]

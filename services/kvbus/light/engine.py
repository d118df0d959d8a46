"""One light engine, put together: what `connector.py` does inside vLLM, without vLLM."""

from hashlib import blake2b
from urllib.parse import urlsplit

import msgspec

from kvbus import __version__
from kvbus.engine.counting import Counting, look_at_link, look_at_scheduler
from kvbus.engine.identity import Identity
from kvbus.engine.landing import LandingCore
from kvbus.engine.link import Link, LinkHandlers
from kvbus.engine.own_matcher import OwnMatcher
from kvbus.engine.rank import RankSide
from kvbus.engine.scheduler import SchedulerSide
from kvbus.engine.settings import EngineSettings
from kvbus.engine.writing import WritingCore
from kvbus.light.frames import Address
from kvbus.light.loop import EngineLoop, Inbox
from kvbus.light.memory import KvMemory
from kvbus.light.plane import RANK, TcpDataPlane
from kvbus.light.scheduler import Scheduler
from kvbus.light.settings import LightSettings
from kvbus.light.shore import Shore
from kvbus_schemas import DrainOrdered, EngineCard, LoadReported, Post, Role

KV_LAYOUT = "light"


class LightEngine:
    """`incarnation` is new at every start; `bus` says how the engine takes part, as for a real engine."""

    def __init__(self, settings: LightSettings, bus: EngineSettings, *, role: Role, model: str) -> None:
        self.settings, self.bus = settings, bus
        self.identity = _identity(settings, bus, role, model)
        me = self.identity
        self.memory = KvMemory(settings.blocks, settings.block_size)
        host = urlsplit(bus.http_url).hostname or settings.host
        self._shore = Shore(self.memory, me.incarnation, settings.host)
        self._address = msgspec.msgpack.encode(Address(host, self._shore.port))
        block_bytes = settings.kv_bytes_per_token * settings.block_size
        block_s = block_bytes / (settings.link_mb_per_s * 1e6) if settings.link_mb_per_s else 0.0
        self._plane = TcpDataPlane(me.nixl_id, self.memory, self._shore, me.compat_hash, block_s=block_s)
        self._link, self._rank_link = self._make_link(me.engine_id), self._make_link(f"{me.engine_id}-r{RANK}")
        self.counting, self.rank_counting = Counting(role), Counting(role)
        self._link.said, self._rank_link.said = self.counting.said, self.rank_counting.said
        if bus.matcher == "engine" and role == "prefill":
            self._link.own_matcher = OwnMatcher(me.engine_id)
        inbox = Inbox()
        self._side = SchedulerSide(me, bus, self._link, inbox)
        writing = WritingCore(me.engine_id, RANK, me.tp_size, me.block_size, block_bytes, progressive=bus.progressive)
        self._rank = RankSide(self._plane, writing, LandingCore(RANK, me.tp_size), self._rank_link)
        self.scheduler = Scheduler(
            self._side,
            self.memory,
            max_seqs=settings.max_num_seqs,
            max_batched_tokens=settings.max_num_batched_tokens,
        )
        self.scheduler.replied = self.counting.replied
        self.loop = EngineLoop(
            self.scheduler,
            self._rank,
            inbox,
            token_us=settings.token_us,
            prefill_tokens_per_s=settings.prefill_tokens_per_s,
            eos_every=settings.eos_every,
        )

    def start(self) -> None:
        """Compute, and join the bus; without a bus the engine serves by itself."""
        self._rank.start()
        if self.bus.nats:
            self._join()
        self.loop.start()

    def _join(self) -> None:
        side, rank = self._side, self._rank
        if side.cache.begin():
            self.scheduler.pool.events = []
        self._rank_link.start(LinkHandlers(hear=rank.hear, seen=self._meet, gone=rank.gone))
        self._link.start(
            LinkHandlers(
                hear=side.hear,
                seen=side.seen,
                gone=side.engine_gone,
                card=self.card,
                load=self.load,
                keep_time=side.keep_time,
            )
        )

    def drain(self) -> None:
        """Tell the routers to choose this engine no more."""
        me = self.identity.engine_id
        self._link.post([Post(me, DrainOrdered(engine_id=me, reason="SIGTERM"))])

    def stop(self) -> None:
        """Withdraw the card and end every thread."""
        self.loop.stop()
        self._link.stop()
        self._rank_link.stop()
        self._rank.stop()
        self._plane.close()

    def card(self) -> EngineCard:
        return self.identity.card(
            http_url=self.bus.http_url,
            progressive=self.bus.progressive,
            own_matcher=self._link.own_matcher is not None,
            agent_metadata={f"0.{RANK}": self._address},
            cache_events=self._side.cache.on,
        )

    def load(self) -> LoadReported:
        """The scheduler's load, read from another thread: a few integers, each right for itself."""
        scheduler = self.scheduler
        return LoadReported(
            engine_id=self.identity.engine_id,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + len(scheduler.parked),
            free_blocks=scheduler.pool.get_num_free_blocks(),
            total_blocks=self.identity.num_blocks,
            tokens_in_flight=scheduler.tokens_in_flight(),
            held_blocks=self._side.reuse.retention.blocks,
        )

    def look(self) -> None:
        """Bring what is counted up to this moment. From any thread."""
        look_at_scheduler(self.counting.tally, self.identity, self._link, self._side)
        look_at_link(self.rank_counting.tally, self._rank_link)

    def _meet(self, card: EngineCard) -> None:
        """Hand-offs go between prefill and decode; equals have nothing to say to each other."""
        if card.role != self.identity.role:
            self._rank.seen(card)

    def _make_link(self, name: str) -> Link:
        bus, me = self.bus, self.identity
        return Link(bus, name=name, engine_id=me.engine_id, incarnation=me.incarnation)


def _identity(settings: LightSettings, bus: EngineSettings, role: Role, model: str) -> Identity:
    what = f"light {__version__} {model} {settings.kv_bytes_per_token}"
    return Identity(
        engine_id=settings.engine_id,
        incarnation=bus.incarnation,
        role=role,
        model=model,
        block_size=settings.block_size,
        num_blocks=settings.blocks,
        tp_size=1,
        pp_size=1,
        max_model_len=settings.max_model_len,
        vllm_version="",
        compat_hash=blake2b(what.encode(), digest_size=16).hexdigest(),
        kv_layout=KV_LAYOUT,
    )

"""From an engine's cache to a router's index: the mirror, vLLM's events, and light engines over real NATS."""

import asyncio
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from tests.light_world import all_quiet, ask
from tests.router_world import until

from kvbus.bus import Bus, BusSettings
from kvbus.engine.cache_events import NAMES_MAX, CacheEvent, CacheMirror, ends_of
from kvbus.engine.cache_tap import CacheTap
from kvbus.local.fleet import Fleet, FleetOptions, start_fleet
from kvbus.process import new_incarnation
from kvbus.router.service import Router
from kvbus.router.settings import RouterSettings
from kvbus_schemas import AnyMessage, BlocksRemoved, BlocksStored, CacheCleared, Post, PromptHashed, subjects

# The mirror


def said(posts: list[Post]) -> list[tuple[str, int]]:
    """(kind, blocks) of each message."""
    return [(type(post.message).__name__, len(getattr(post.message, "block_hashes", ()))) for post in posts]


def test_only_changes_are_said_and_all_of_them_are_counted() -> None:
    mirror = CacheMirror("p0", 16)
    posts = mirror.receive([CacheEvent("stored", [1, 2]), CacheEvent("stored", [1, 2, 3], None)])
    assert said(posts) == [("BlocksStored", 2), ("BlocksStored", 1)]
    assert posts[1].message.parent_hash == mirror.name_of(2)  # type: ignore[attr-defined]
    posts += mirror.receive([CacheEvent("removed", [2]), CacheEvent("removed", [3]), CacheEvent("removed", [9])])
    posts += mirror.receive([CacheEvent("cleared")])
    assert said(posts)[2:] == [("BlocksRemoved", 2), ("CacheCleared", 0)]
    assert [post.message.event_seq for post in posts] == [1, 2, 3, 4]  # type: ignore[attr-defined]


def test_a_restatement_says_everything_in_messages_that_fit() -> None:
    mirror = CacheMirror("p0", 16)
    mirror.receive([CacheEvent("stored", range(1, NAMES_MAX + 2))])
    posts = mirror.restate()
    assert said(posts) == [("CacheCleared", 0), ("BlocksStored", NAMES_MAX), ("BlocksStored", 1)]
    first = posts[0].message
    assert isinstance(first, CacheCleared)
    assert (first.restates, first.block_count) == (True, NAMES_MAX + 1)


def test_names_are_keyed_and_the_same_for_numbers_and_bytes() -> None:
    one, other = CacheMirror("p0", 16, "a secret"), CacheMirror("p1", 16)
    number = int.from_bytes(b"\x01" * 8, "big")
    assert one.name_of(b"\x09" * 24 + b"\x01" * 8) == one.name_of(number) != other.name_of(number)
    assert CacheMirror("p2", 32, "a secret").name_of(number) == one.name_of(number)


def test_few_blocks_of_a_long_prompt_are_named_and_the_same_ones_of_every_prompt() -> None:
    assert ends_of(10) == list(range(1, 11))
    long = ends_of(6250)
    assert len(long) < 200
    assert max(after - before for before, after in pairwise(long)) <= 6250 / 8
    assert ends_of(500) == [end for end in long if end <= 500]
    assert ends_of(0) == []


# vLLM's block pool, as far as the tap uses it


class BlockStored(SimpleNamespace):
    pass


class BlockRemoved(SimpleNamespace):
    pass


class AllBlocksCleared(SimpleNamespace):
    pass


class Manager:
    """vLLM's names, and nothing else of it."""

    def __init__(self) -> None:
        self.block_pool: Any = SimpleNamespace(
            enable_kv_cache_events=False,
            kv_event_queue=[],
            cached_block_hash_to_block=SimpleNamespace(get_one_block=self._found),
        )
        self.there: dict[bytes, object] = {}

    def _found(self, key: bytes) -> object:
        return self.there.get(key)

    def take_events(self) -> list[Any]:
        events, self.block_pool.kv_event_queue = self.block_pool.kv_event_queue, []
        return list(events)


def test_the_tap_switches_events_on_and_passes_them_on_untouched() -> None:
    manager, got = Manager(), list[CacheEvent]()
    tap = CacheTap(manager, got.extend)
    assert manager.block_pool.enable_kv_cache_events
    events = [BlockStored(block_hashes=[b"x" * 32], parent_block_hash=None, token_ids=[1]), AllBlocksCleared()]
    manager.block_pool.kv_event_queue = list(events)
    assert tap.waiting
    assert manager.take_events() == events
    assert got == [CacheEvent("stored", [b"x" * 32], None), CacheEvent("cleared")]
    assert not tap.waiting
    assert not CacheTap().waiting


def test_a_block_that_has_a_twin_is_not_gone() -> None:
    manager, got = Manager(), list[CacheEvent]()
    CacheTap(manager, got.extend)
    manager.there[b"y" * 32 + b"\0\0\0\0"] = object()
    manager.block_pool.kv_event_queue = [BlockRemoved(block_hashes=[b"y" * 32]), BlockRemoved(block_hashes=[b"z" * 32])]
    manager.take_events()
    assert got == [CacheEvent("removed", [b"z" * 32])]


# Light engines, a router in this loop, and real NATS

TEXT = "It was a dark and stormy night; the rain fell in torrents, except at occasional intervals. "


async def router_of(fleet: Fleet, **settings: Any) -> Router:
    given = RouterSettings(nats=fleet.nats_url, port=0, **settings)
    router = Router(given, name="router-test", incarnation=new_incarnation())
    await router.start()
    await until(lambda: all(engine in router.caching.states for engine in ("prefill-0", "decode-0")))
    await until(lambda: set(router.caching.states.values()) == {"exact"})
    return router


async def metrics(http: aiohttp.ClientSession, url: str) -> dict[str, float]:
    async with http.get(url + "/metrics") as response:
        lines = [line for line in (await response.text()).splitlines() if line[:1] != "#"]
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


@pytest.mark.nats
async def test_the_index_says_what_prefill_finds_and_survives_loss_clearing_and_restarts(tmp_path: Path) -> None:
    options = FleetOptions(engine="sim", prefill=2, decode=1, work_dir=tmp_path)
    async with start_fleet(options) as fleet, aiohttp.ClientSession() as http:
        router = await router_of(fleet)
        try:
            await _same_prefix_same_engine(fleet, router, http)
            await _loss_is_noticed(router)
            await _clearing_is_seen(fleet, router, http)
            await _a_new_router_knows_it_all(fleet, router, http)
            await _an_engine_takes_its_blocks_along(fleet, router)
        finally:
            await router.close()


async def _same_prefix_same_engine(fleet: Fleet, router: Router, http: aiohttp.ClientSession) -> None:
    """The second request goes where the first one is, and that engine finds what the router expects."""
    for number in range(3):
        await ask(http, router.url, {"prompt": TEXT * 20 + str(number) * 100})
        await until(lambda: router.caching.index.facts()["prefill-0"].blocks or router.caching.index.blocks)
        await all_quiet(http, [engine.url for engine in fleet.engines])
    used = [name for name in ("prefill-0", "prefill-1") if router.caching.index.held(name)]
    assert len(used) == 1
    hits = await metrics(http, fleet.engine(used[0]).url)
    found = sum(value for name, value in hits.items() if name.startswith("vllm:prefix_cache_hits_total"))
    asked = {"prompt": TEXT * 20 + "another end " * 20}
    expected = router.caching.read(_body(asked)).hits[used[0]]
    await ask(http, router.url, asked)
    more = await metrics(http, fleet.engine(used[0]).url)
    really = sum(value for name, value in more.items() if name.startswith("vllm:prefix_cache_hits_total")) - found
    assert 0 < expected <= really <= expected * 1.3 + 32
    page = await metrics(http, router.url)
    assert page[f'kvbus_router_cache_exact{{engine="{used[0]}"}}'] == 1
    assert page[f'kvbus_router_cache_blocks{{engine="{used[0]}"}}'] == len(router.caching.index.held(used[0]))


def _body(members: dict[str, Any]) -> Any:
    import msgspec

    from kvbus.router import bodies

    return bodies.read("completions", msgspec.json.encode({"model": "tiny", **members}))


async def _loss_is_noticed(router: Router) -> None:
    """A word that never came shows with the next one; the engine is asked, and says all of it again."""
    index = router.caching.index
    name = max(("prefill-0", "prefill-1"), key=lambda engine: len(index.held(engine)))
    before, incarnation = index.held(name), index.incarnation(name)
    index.receive(
        BlocksStored(
            engine_id=name, incarnation=incarnation, event_seq=index.seq(name) + 5, block_hashes=[b"bad" * 2],
            block_size=16,
        )
    )  # fmt: skip
    assert index.state(name) == "degraded"
    index._engines[name].seq -= 5  # that word was never said: the count goes on where the engine's does
    await until(lambda: index.state(name) == "exact", timeout_s=15)
    assert index.held(name) == before
    assert index.facts()[name].recoveries >= 1


async def _clearing_is_seen(fleet: Fleet, router: Router, http: aiohttp.ClientSession) -> None:
    name = max(("prefill-0", "prefill-1"), key=lambda engine: len(router.caching.index.held(engine)))
    async with http.post(fleet.engine(name).url + "/reset_prefix_cache") as response:
        assert response.status == 200
    await until(lambda: not router.caching.index.held(name))
    assert router.caching.index.state(name) == "exact"
    await ask(http, router.url, {"prompt": TEXT * 20})
    await until(lambda: any(router.caching.index.held(engine) for engine in ("prefill-0", "prefill-1")))
    await all_quiet(http, [engine.url for engine in fleet.engines])


async def _a_new_router_knows_it_all(fleet: Fleet, router: Router, http: aiohttp.ClientSession) -> None:
    """It asks the engines for their caches, and reads back from the trace what beginnings became."""
    again = Router(RouterSettings(nats=fleet.nats_url, port=0), name="router-again", incarnation=new_incarnation())
    await again.start()
    try:
        await until(lambda: again.caching.states.get("prefill-1") == "exact", timeout_s=15)
        await until(lambda: set(again.caching.states.values()) == {"exact"}, timeout_s=15)
        for name in ("prefill-0", "prefill-1"):
            assert again.caching.index.held(name) == router.caching.index.held(name)
        asked = _body({"prompt": TEXT * 20 + "z"})
        assert again.caching.read(asked).hits == router.caching.read(asked).hits != {}
    finally:
        await again.close()


async def _an_engine_takes_its_blocks_along(fleet: Fleet, router: Router) -> None:
    index = router.caching.index
    name = max(("prefill-0", "prefill-1"), key=lambda engine: len(index.held(engine)))
    await fleet.engine(name).child.stop()
    await until(lambda: index.state(name) is None, timeout_s=15)
    assert name not in router.caching.read(_body({"prompt": TEXT * 20})).hits


@pytest.mark.nats
async def test_nothing_but_names_is_said_and_nothing_at_all_when_switched_off(tmp_path: Path) -> None:
    for on in (True, False):
        options = FleetOptions(
            engine="sim", work_dir=tmp_path / str(on), engine_settings={"cache_events": str(on).lower()}
        )
        heard: list[AnyMessage] = []
        async with start_fleet(options) as fleet, aiohttp.ClientSession() as http:
            tap = await Bus.connect(BusSettings(nats=fleet.nats_url), name="tap", incarnation="i")
            await tap.subscribe(f"{subjects.ROOT}.cache.>", heard.append)
            await ask(http, fleet.base_url, {"prompt": TEXT * 20})
            if on:
                await until(_both(heard, BlocksStored, PromptHashed))
            else:
                await asyncio.sleep(0.3)
            await tap.close()
        kinds = {type(message) for message in heard}
        assert kinds.isdisjoint({BlocksStored, BlocksRemoved, PromptHashed}) is not on
        assert all(len(name) == 8 for message in heard for name in getattr(message, "block_hashes", ()) if name)


def _both(heard: list[AnyMessage], *kinds: type) -> Callable[[], bool]:
    return lambda: {type(message) for message in heard}.issuperset(kinds)

"""The parts of a light engine: what it computes comes out of its blocks, and WRITEs land where they were sent."""

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from kvbus.engine.facts import read_landing_note
from kvbus.engine.settings import engine_settings
from kvbus.engine.writing import Write
from kvbus.errors import ConfigError
from kvbus.light.engine import LightEngine
from kvbus.light.frames import Address, Blocks, Hello, Welcome, receive, send
from kvbus.light.language import next_token, packed, tokens_of
from kvbus.light.memory import BlockPool, KvMemory
from kvbus.light.plane import TcpDataPlane
from kvbus.light.request import Delta, Request
from kvbus.light.settings import LightSettings, light_settings
from kvbus.light.shore import Shore
from kvbus_schemas import EngineCard

LONG = "Everything that is decided inside the engines becomes a subscriber that can be watched. " * 12


# Memory and model.


def test_the_next_token_depends_on_every_token_before_it() -> None:
    tokens = tokens_of("a prompt of some length")
    answers = {next_token(packed([*tokens[:at], 7, *tokens[at + 1 :]]), eos_every=0) for at in range(len(tokens))}
    assert len(answers) > 5


def test_memory_gives_back_what_was_written_at_any_position() -> None:
    memory, table = KvMemory(8, 4), [5, 0, 7]
    memory.write(table, 0, [1, 2, 3])
    memory.write(table, 3, [4, 5, 6, 7, 8, 9])
    assert memory.read(table, 9) == packed([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert memory.get(0) == packed([5, 6, 7, 8])
    with pytest.raises(ValueError, match="do not fit"):
        memory.put(8, bytes(16))


def test_a_free_block_is_found_by_its_name_until_it_is_taken_again() -> None:
    pool = BlockPool(3)
    first = pool.take(2)
    assert first is not None
    pool.name(first[0], b"a")
    pool.name(first[1], b"b")
    pool.free_blocks(reversed(first))
    assert pool.get_num_free_blocks() == 3
    assert pool.find([b"a", b"b", b"c"]) == first
    assert pool.take(4) is None
    assert pool.take(2) is not None  # the one never used, and the end of what was given back
    assert pool.find([b"a", b"b"]) == first[:1]


# One engine, in this process.


def engine_of(**given: Any) -> LightEngine:
    settings = LightSettings(nats="", engine_id="alone", token_us=0, prefill_tokens_per_s=0, **given)
    return LightEngine(settings, engine_settings({"nats": "", "incarnation": "i1"}), role="decode", model="tiny")


@contextlib.contextmanager
def running(engine: LightEngine) -> Iterator[LightEngine]:
    engine.start()
    yield engine
    engine.stop()
    assert not engine.loop.failed
    assert engine.scheduler.pool.get_num_free_blocks() == engine.settings.blocks


class Listener:
    """Takes one request's answer from the engine's thread."""

    def __init__(self, name: str, prompt: str, max_tokens: int = 40, **given: Any) -> None:
        self.tokens: list[int] = []
        self.ended = threading.Event()
        self.reason, self.cached_tokens = "", 0
        self.request = Request(name, tokens_of(prompt), max_tokens, self.deliver, ignore_eos=True, **given)

    def deliver(self, delta: Delta) -> None:
        self.tokens += [] if delta.token is None else [delta.token]
        if delta.finish_reason:
            self.reason, self.cached_tokens = delta.finish_reason, delta.cached_tokens
            self.ended.set()


def answers(engine: LightEngine, listeners: list[Listener]) -> list[list[int]]:
    for listener in listeners:
        engine.loop.add(listener.request)
    assert all(listener.ended.wait(10) for listener in listeners)
    return [listener.tokens for listener in listeners]


def test_preempted_requests_are_answered_like_any_other_and_all_blocks_come_back() -> None:
    prompts = [f"prompt number {number} {'x' * number}" for number in range(8)]
    with running(engine_of(blocks=400)) as roomy:
        expected = answers(roomy, [Listener(f"r{n}", prompt) for n, prompt in enumerate(prompts)])
    with running(engine_of(blocks=24, block_size=8)) as tight:
        assert answers(tight, [Listener(f"r{n}", prompt) for n, prompt in enumerate(prompts)]) == expected
        assert tight.scheduler.counters.preemptions > 0


def test_a_prefix_that_is_here_is_not_computed_again() -> None:
    with running(engine_of()) as engine:
        first, second = Listener("r1", LONG), Listener("r2", LONG)
        assert answers(engine, [first]) == answers(engine, [second])
        assert (first.cached_tokens, second.cached_tokens) == (0, (len(LONG) - 1) // 32 * 32)


def test_another_salt_shares_nothing() -> None:
    with running(engine_of()) as engine:
        first, second = Listener("r1", LONG, cache_salt="a"), Listener("r2", LONG, cache_salt="b")
        assert answers(engine, [first]) == answers(engine, [second])
        assert second.cached_tokens == 0


def test_a_changed_block_changes_the_answer() -> None:
    with running(engine_of()) as engine:
        first, second = Listener("r1", LONG), Listener("r2", LONG)
        expected = answers(engine, [first])
        engine.memory.wipe([3])
        assert answers(engine, [second]) != expected


def test_an_aborted_request_gives_its_blocks_back() -> None:
    with running(engine_of()) as engine:
        listener = Listener("r1", LONG, max_tokens=5000)
        engine.loop.add(listener.request)
        engine.loop.abort("r1")
        engine.loop.abort("r1")
        assert listener.ended.wait(5)
        assert listener.reason == "abort"


def test_a_wrong_setting_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="blocks of sim_engine is 1: it must be at least 2"):
        light_settings({"blocks": 1})
    monkeypatch.setenv("KVBUS_SIM_ENGINE_TOKEN_USS", "3")
    with pytest.raises(ConfigError, match="did you mean 'token_us'"):
        light_settings({})


# The data plane.


class Pair:
    """A producer's plane connected to a consumer's memory."""

    def __init__(self, *, block_s: float = 0.0) -> None:
        self.source, self.target = KvMemory(8, 4), KvMemory(8, 4)
        self.shore = Shore(self.target, "i2", "127.0.0.1")
        self.plane = TcpDataPlane("p.i1", self.source, Shore(self.source, "i1", "127.0.0.1"), "h", block_s=block_s)

    def card(self, port: int = 0, **given: Any) -> EngineCard:
        address = msgspec.msgpack.encode(Address("127.0.0.1", port or self.shore.port))
        says: dict[str, Any] = {"block_size": 4, "compat_hash": "h", "incarnation": "i2"} | given
        return EngineCard(
            engine_id="d", role="decode", model="m", http_url="", num_blocks=8, agent_metadata={"0.0": address}, **says
        )

    def connect(self, card: EngineCard) -> str:
        said: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.plane.connect(card, said.put)
        return said.get(timeout=5)

    def write(self, number: int = 1, first: int = 0) -> list[int]:
        write = Write(f"w{number}", "t" * 32, "d", "i2", first, (1, 2), (6, 5))
        return self.plane.submit(write, None)

    def end(self, handles: list[int]) -> str:
        deadline_s = time.monotonic() + 5
        while (state := self.plane.poll(handles)) == "pending":
            assert time.monotonic() < deadline_s
            time.sleep(0.001)
        return state

    def close(self) -> None:
        self.plane.close()
        self.shore.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def test_a_write_lands_in_the_named_blocks_and_its_note_follows(pair: Pair) -> None:
    pair.source.write([1, 2], 0, [1, 2, 3, 4, 5, 6])
    assert pair.connect(pair.card()) == ""
    assert pair.end(pair.write(first=3)) == "done"
    assert pair.target.read([6, 5], 6) == packed([1, 2, 3, 4, 5, 6])
    assert [read_landing_note(note) for note in pair.shore.notes()] == [("t" * 32, 0, 3, 2)]
    assert pair.shore.notes() == []


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"block_size": 8}, ["8", "4"]),
        ({"compat_hash": "other"}, ["other", "h"]),
        ({"incarnation": "i0"}, ["i0", "i2"]),
    ],
)
def test_an_unlike_peer_is_refused_by_name_of_both_values(pair: Pair, given: dict[str, Any], names: list[str]) -> None:
    error = pair.connect(pair.card(**given))
    assert all(name in error for name in names)
    assert not pair.plane.connected("d", given.get("incarnation", "i2"))


def test_a_write_that_has_not_gone_out_can_be_stopped_for_good() -> None:
    pair = Pair(block_s=0.1)
    assert pair.connect(pair.card()) == ""
    first, second = pair.write(1), pair.write(2)
    assert pair.plane.abort(second)
    assert pair.end(first) == "done"
    time.sleep(0.3)
    assert len(pair.shore.notes()) == 1
    pair.close()


def test_a_write_that_has_gone_out_is_over_only_when_its_consumer_says_so(pair: Pair) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        met: list[socket.socket] = []

        def take() -> None:
            sock, _ = server.accept()
            assert isinstance(receive(sock), Hello)
            send(sock, Welcome())
            assert isinstance(receive(sock), Blocks)
            met.append(sock)

        consumer = threading.Thread(target=take)
        consumer.start()
        assert pair.connect(pair.card(server.getsockname()[1])) == ""
        handles = pair.write()
        consumer.join(5)
        assert pair.plane.poll(handles) == "pending"
        assert not pair.plane.abort(handles)
        pair.plane.disconnect("d", "i2")
        assert pair.plane.poll(handles) == "pending"
        met[0].close()
        assert pair.end(handles) == "failed"

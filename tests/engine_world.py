"""What stands around an engine's two sides in a test: a link that keeps what is posted, and a data plane by hand."""

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from kvbus.bus import BusSettings
from kvbus.engine.handle import EngineHandle
from kvbus.engine.identity import Identity
from kvbus.engine.link import Link
from kvbus.engine.pushes import Write
from kvbus.engine.scheduler import SchedulerSide
from kvbus.engine.settings import EngineSettings
from kvbus_schemas import EngineCard, Post, Role, Ticket

BLOCK_SIZE = 4
T = "a" * 32


class StillLink(Link):
    """The production link, never started: posts stay in `posted`. `up` and `fresh` are what the bus would tell."""

    def __init__(self, engine_id: str) -> None:
        super().__init__(BusSettings(), name=engine_id, engine_id=engine_id, incarnation="i1")
        self.posted: list[Post] = []
        self.up = self.fresh = True
        self.state.lease = 1

    @property
    def connected(self) -> bool:
        return self.up

    def presence_fresh(self, within_s: float) -> bool:
        return self.fresh

    def post(self, posts: Any) -> None:
        self.posted += posts

    def told(self) -> list[tuple[str, str]]:
        """(receiver, kind) of all that was posted."""
        return [(post.to, type(post.message).__name__) for post in self.posted]


class HandPlane:
    """A data plane whose handshakes and WRITEs end when the test says so."""

    def __init__(self) -> None:
        self.asked: list[tuple[EngineCard, Callable[[str], None]]] = []
        self.up: set[tuple[str, str]] = set()
        self.left: list[tuple[str, str]] = []
        self.submitted: list[Write] = []
        self.state = "pending"
        self.broken = ""
        self.notes_in: list[bytes] = []

    def connect(self, card: EngineCard, done: Callable[[str], None]) -> None:
        self.asked.append((card, done))

    def shake(self, error: str = "") -> None:
        """The oldest handshake ends."""
        card, done = self.asked.pop(0)
        if not error:
            self.up.add((card.engine_id, card.incarnation))
        done(error)

    def connected(self, engine_id: str, incarnation: str) -> bool:
        return (engine_id, incarnation) in self.up

    def disconnect(self, engine_id: str, incarnation: str) -> None:
        self.left.append((engine_id, incarnation))
        self.up.discard((engine_id, incarnation))

    def submit(self, write: Write, ready: Any) -> list[int]:
        if self.broken:
            raise RuntimeError(self.broken)
        self.submitted.append(write)
        return [len(self.submitted)]

    def poll(self, handles: list[int]) -> str:
        return self.state

    def abort(self, handles: list[int]) -> bool:
        return True

    def notes(self) -> list[bytes]:
        notes, self.notes_in = self.notes_in, []
        return notes


def identity(role: Role, engine_id: str) -> Identity:
    return Identity(
        engine_id=engine_id, incarnation="i1", role=role, model="m", block_size=BLOCK_SIZE, num_blocks=64, tp_size=1,
        pp_size=1, max_model_len=1024, vllm_version="0.32", compat_hash="c",
    )  # fmt: skip


def card(engine_id: str, incarnation: str = "i1", tp_size: int = 1) -> EngineCard:
    return EngineCard(
        engine_id=engine_id, role="prefill" if engine_id[0] == "p" else "decode", model="m", http_url="http://h",
        block_size=BLOCK_SIZE, num_blocks=64, compat_hash="c", incarnation=incarnation, tp_size=tp_size, lease=1,
    )  # fmt: skip


def side_of(role: Role, engine_id: str) -> tuple[SchedulerSide, StillLink]:
    """An engine's scheduler side without an engine core around it."""
    link = StillLink(engine_id)
    return SchedulerSide(identity(role, engine_id), EngineSettings(wait_max_ms=0.0), link, EngineHandle()), link


def ticket(role: str, **changes: Any) -> Ticket:
    fields: dict[str, Any] = {
        "transfer_id": T, "role": role, "mode": "early", "producer_id": "p0", "producer_incarnation": "i1",
        "consumer_id": "d0", "consumer_incarnation": "i1", "deadline_s": 60.0,
    }  # fmt: skip
    return Ticket(**(fields | changes))


def request(name: str, params: Any, tokens: int = 10, status: str = "FINISHED_LENGTH_CAPPED") -> Any:
    """What a hook reads of one of vLLM's requests."""
    prompt = list(range(tokens))
    return SimpleNamespace(
        request_id=name, kv_transfer_params=params, prompt_token_ids=prompt, all_token_ids=prompt, block_hashes=[],
        num_computed_tokens=0, status=SimpleNamespace(name=status), mm_features=None, lora_request=None,
    )  # fmt: skip


def step(number: int = 0) -> Any:
    """What a hook reads of vLLM's scheduler output, for a step that computes nothing."""
    return SimpleNamespace(
        total_num_scheduled_tokens=number, scheduled_new_reqs=[], preempted_req_ids=set(), num_scheduled_tokens={},
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set()
        ),
    )  # fmt: skip


def until(holds: Callable[[], object], within_s: float = 10.0) -> None:
    """Wait for another thread."""
    deadline_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)

"""Requests inside one engine, and what one schedule says of them, with the fields that a connector reads."""

from enum import Enum, auto
from typing import Any

from kvbus.sim.memory import Tokens


class Status(Enum):
    WAITING = auto()
    WAITING_FOR_REMOTE_KVS = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED_LENGTH_CAPPED = auto()
    FINISHED_ABORTED = auto()


FINISHED = (Status.FINISHED_LENGTH_CAPPED, Status.FINISHED_ABORTED)


class Request:
    """One request inside one engine, with the fields that a connector reads."""

    __slots__ = (
        "awaits", "block_ids", "kv_transfer_params", "leg", "max_new", "num_cached_tokens", "num_computed_tokens",
        "parked", "prompt_token_ids", "reply", "request_id", "status", "tokens", "transfer_id",
    )  # fmt: skip

    def __init__(
        self, request_id: str, prompt: Tokens, max_new: int, params: dict[str, Any] | None, transfer_id: str, leg: Any
    ) -> None:
        self.request_id, self.transfer_id, self.leg = request_id, transfer_id, leg
        self.kv_transfer_params = params
        self.prompt_token_ids = list(prompt)
        self.tokens = prompt
        self.max_new = max_new
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.status = Status.WAITING
        self.block_ids: list[int] = []
        self.parked = False
        """Its blocks are held for its transfer and nothing else."""
        self.awaits = ""
        """The transfer that it is parked for."""
        self.reply: dict[str, Any] | None = None
        """`kv_transfer_params` of its HTTP reply."""

    @property
    def all_token_ids(self) -> Tokens:
        return self.tokens


class New:
    """A request that is scheduled for the first time."""

    __slots__ = ("block_ids", "num_computed_tokens", "req_id")

    def __init__(self, request: Request) -> None:
        self.req_id = request.request_id
        self.block_ids = (list(request.block_ids),)
        self.num_computed_tokens = request.num_computed_tokens


class Cached:
    """Requests that the ranks know already."""

    __slots__ = ("new_block_ids", "num_computed_tokens", "req_ids", "resumed_req_ids")

    def __init__(self) -> None:
        self.req_ids: list[str] = []
        self.new_block_ids: list[tuple[list[int]] | None] = []
        self.num_computed_tokens: list[int] = []
        self.resumed_req_ids: set[str] = set()


class Output:
    """What one schedule has decided."""

    __slots__ = (
        "num_scheduled_tokens", "preempted_req_ids", "scheduled", "scheduled_cached_reqs", "scheduled_new_reqs",
        "total_num_scheduled_tokens",
    )  # fmt: skip

    def __init__(self) -> None:
        self.scheduled: list[tuple[Request, int, int]] = []
        self.scheduled_new_reqs: list[New] = []
        self.scheduled_cached_reqs = Cached()
        self.num_scheduled_tokens: dict[str, int] = {}
        self.total_num_scheduled_tokens = 0
        self.preempted_req_ids: set[str] = set()

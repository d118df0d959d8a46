"""A request as the engine's loop has it, under the names that vLLM's scheduler hooks use."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from kvbus.light.memory import block_name


class Status(Enum):
    WAITING = auto()
    WAITING_FOR_REMOTE_KVS = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED_STOPPED = auto()
    FINISHED_LENGTH_CAPPED = auto()
    FINISHED_ABORTED = auto()

    @property
    def finished(self) -> bool:
        return self.name.startswith("FINISHED")


FINISH_REASONS = {Status.FINISHED_STOPPED: "stop", Status.FINISHED_LENGTH_CAPPED: "length"}


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new of an answer."""

    token: int | None = None
    finish_reason: str = ""
    """`stop`, `length` or `abort` at the end; empty before."""
    cached_tokens: int = 0
    params: dict[str, Any] | None = None
    """At the end: `kv_transfer_params` of the reply."""


@dataclass(eq=False)
class Request:
    """One prompt and its answer; `deliver` is called on the engine's thread for each new token and for the end."""

    request_id: str
    prompt_token_ids: list[int]
    max_tokens: int
    deliver: Callable[[Delta], None]
    kv_transfer_params: dict[str, Any] | None = None
    ignore_eos: bool = False
    min_tokens: int = 0
    cache_salt: str = ""
    status: Status = Status.WAITING
    num_computed_tokens: int = 0
    num_cached_tokens: int = -1
    all_token_ids: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    named: int = 0
    """Full blocks that are known to the pool under their names."""
    block_hashes: list[bytes] = field(default_factory=list)
    """Names of the prompt's full blocks."""
    _names: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.all_token_ids = list(self.prompt_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.all_token_ids) - len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.all_token_ids[len(self.prompt_token_ids) :]

    def names(self, count: int, block_size: int) -> list[bytes]:
        """Names of the first `count` blocks, all of which are full."""
        while len(self._names) < count:
            start = len(self._names) * block_size
            before = self._names[-1] if self._names else self.cache_salt.encode()[:64]
            self._names.append(block_name(before, self.all_token_ids[start : start + block_size]))
        return self._names[:count]

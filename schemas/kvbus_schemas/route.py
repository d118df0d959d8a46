"""Route plane: which engines were considered for a request, which were taken, and how the request ended."""

from typing import ClassVar, Literal

import msgspec

from kvbus_schemas.envelope import Message, Plane
from kvbus_schemas.ticket import Mode


class Candidate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One engine that a policy looked at. The highest score wins; the parts of the score are in `terms`."""

    engine_id: str
    role: Literal["prefill", "decode"]
    score: float
    terms: dict[str, float] = {}
    load_age_ms: float = 0.0
    """Age of the load report that the score was built on, in milliseconds."""


class EngineView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a router knows of an engine at the moment of a decision."""

    engine_id: str
    role: Literal["prefill", "decode"]
    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    load_age_ms: float = 0.0
    hit_tokens: int = 0
    """Tokens of this prompt that the engine already holds, as far as the router knows."""
    queued_tokens: int = 0
    """Prompt tokens that the engine has still to compute for others, at a guess of the router's."""
    cache: Literal["", "exact", "degraded"] = ""
    """How well the router knows the engine's prefix cache; empty: not at all."""


class RouteDecided(Message, frozen=True, kw_only=True):
    """The router has chosen. Published before the HTTP legs are sent."""

    PLANE: ClassVar[Plane] = "route"

    transfer_id: str
    request_id: str
    mode: Mode
    prefill_id: str = ""
    """Empty in mode local."""
    decode_id: str = ""
    """Empty in mode deferred, until the second RouteDecided of the same transfer."""
    policy: str
    reason: str
    candidates: list[Candidate] = []
    attempt: int = 1
    prompt_bytes: int = 0
    """Size of the request body, which is what a router knows about the prompt's length."""
    conversation: str = ""
    deadline_s: float = 0.0
    decided_us: int = 0
    """How long the choice took, in microseconds; with a router on the bus, the wait for its answer included."""
    asked: Mode | None = None
    """The mode that the policy was asked for: the client's wish, as far as these engines allow it."""
    engines: list[EngineView] = []
    """The engines that the policy saw, in its order; in mode deferred's second decision the decodes only."""
    engines_left_out: int = 0
    """How many more it saw: a decision names at most 16 of each role."""
    after_ms: float = 0.0
    """From the request's arrival at the router to this transfer's first choice, in milliseconds."""
    canary: bool = False
    """True: the request belonged to the share that is sent to a canary, whoever decided in the end."""
    prompt_tokens: int = 0
    """Length of the prompt, at a guess of the router's; 0: not known."""
    head: str = ""
    """Digest of how the prompt begins, under the routers' secret; equal where two prompts begin alike."""

    @property
    def key(self) -> str:
        return self.transfer_id


class RequestServed(Message, frozen=True, kw_only=True):
    """The router's last word on a dispatch: what the client got."""

    PLANE: ClassVar[Plane] = "route"

    transfer_id: str
    request_id: str
    mode: Mode
    outcome: Literal["completed", "failed", "cancelled", "retried"]
    status: int
    """HTTP status sent to the client; 499 when the client left first."""
    ttft_ms: float = 0.0
    """From the request's arrival at the router to the first body byte to the client; 0 when there was none."""
    duration_ms: float = 0.0
    attempt: int = 1
    error: str = ""
    conversation: str = ""

    @property
    def key(self) -> str:
        return self.transfer_id


class RouteAsked(Message, frozen=True, kw_only=True):
    """A router asks the routers on the bus where a request should go. Answer `source` within `deadline_ms`, once.

    `engines` are those that may be chosen: alive, of the model, compatible, not tried by this request before.
    """

    PLANE: ClassVar[Plane] = "route"

    ask_id: str
    request_id: str
    model: str
    prompt_bytes: int
    engines: list[EngineView]
    deadline_ms: float
    conversation: str = ""
    shadow: bool = False
    """True: the answer is recorded and compared, never used."""
    asked: Mode | None = None
    """The mode that the answer must have; None leaves the choice. Without a prefill in `engines` it is local."""
    part: Literal["both", "decode"] = "both"
    """`decode`: prefill is done (mode deferred); answer with a decode_id, an empty prefill_id and mode deferred."""
    attempt: int = 1
    transfer_id: str = ""
    """The dispatch that this is asked for."""
    prompt_tokens: int = 0
    """Length of the prompt, at a guess of the router's; 0: not known."""
    head: str = ""
    """Digest of how the prompt begins, under the routers' secret; equal where two prompts begin alike."""

    @property
    def key(self) -> str:
        return self.ask_id


class RouteAnswered(Message, frozen=True, kw_only=True):
    """A router's answer to RouteAsked. `to` is the asking router, its `source`."""

    PLANE: ClassVar[Plane] = "route"

    ask_id: str
    prefill_id: str
    """One of the engines asked about; empty in mode local, and where only a decode is asked for."""
    decode_id: str
    """One of the engines asked about; may be empty in mode deferred, until a decode is asked for."""
    mode: Mode = "early"
    reason: str = ""
    candidates: list[Candidate] = []

    @property
    def key(self) -> str:
        return self.ask_id

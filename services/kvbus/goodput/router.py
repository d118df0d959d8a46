"""A router of the simulation: production's fleet, index and policy, fed as the bus feeds them. Pure."""

from collections.abc import Iterable, Mapping

from kvbus.goodput.engines import Job
from kvbus.goodput.traces import BLOCK, Ask
from kvbus.router.cache_heads import Heads
from kvbus.router.cache_index import CacheIndex
from kvbus.router.cache_prompt import Prompt
from kvbus.router.fleet import CACHE, Engine, Fleet
from kvbus.router.policies import Policy, RouteChoice, RouteQuestion
from kvbus_schemas import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    EngineCard,
    EngineView,
    LoadReported,
    Post,
    PromptHashed,
    PromptMapped,
    Role,
)

MARKS_MAX = 200_000
BLOCKS_MAX = 1_000_000
TOKEN_BYTES = 4
"""Of a token in the prompts that stand for the trace's."""
SECRET = b"goodput"


class Beginnings(Prompt):
    """The prompt that stands for a trace's: each block is text that says its id. All of its marks are made at once,
    and its text is dropped."""

    def __init__(self, ask: Ask) -> None:
        text = b"".join((b"%016x" % name) * (BLOCK * TOKEN_BYTES // 16) for name in ask.ids)
        super().__init__(text + b"." * (TOKEN_BYTES * (ask.tokens % BLOCK)), b"", SECRET)
        self._size = len(self.text)
        self._first = super().head
        list(self.marks())
        self.text = b""

    @property
    def size(self) -> int:
        """Bytes of the prompt that it was."""
        return self._size if hasattr(self, "_size") else len(self.text)

    @property
    def head(self) -> str:
        """Of the prompt that it was."""
        return self._first


class SimRouter:
    """One router. `restart` takes all that it knows away, as a new process has it."""

    def __init__(self, policy: Policy, engines: Mapping[str, Role]) -> None:
        self.policy = policy
        self._engines = engines
        self.restart()

    def restart(self, policy: Policy | None = None) -> None:
        """Begin anew: no loads, no index, nothing learned; engines are known by their cards."""
        self.policy = policy or self.policy
        self.fleet, self.heads, self.index = Fleet(), Heads(MARKS_MAX), CacheIndex(BLOCKS_MAX)
        for name, role in self._engines.items():
            self.fleet.card_seen(
                EngineCard(
                    engine_id=name, role=role, model="m", http_url="", block_size=BLOCK, num_blocks=1, incarnation="",
                    capabilities=[CACHE],
                )
            )  # fmt: skip
        self.index.follow(dict.fromkeys(self._engines, ""))
        self._sent: dict[str, Prompt] = {}

    def choose(self, job: Job, prompt: Prompt, now_s: float) -> RouteChoice:
        """Ask the policy."""
        hits = self.index.hits(self.heads.known(prompt))
        ask = job.ask
        choice = self.policy.choose(
            RouteQuestion(
                request_id=job.key,
                model="m",
                prompt_bytes=prompt.size,
                prompt_tokens=ask.tokens,
                prefills=self._views("prefill", now_s, hits),
                decodes=self._views("decode", now_s, hits),
                conversation=ask.session,
                head=prompt.head,
            )
        )
        job.mode, job.prefill, job.decode = choice.mode, choice.prefill_id, choice.decode_id
        job.work = max(1, ask.tokens - hits.get(choice.prefill_id or choice.decode_id, 0))
        self._sent[job.key] = prompt
        for name, work in ((job.prefill, job.work), (job.decode, 0 if job.prefill else job.work)):
            if name:
                self.fleet.sent(name, work)
        return choice

    def choose_decode(self, job: Job, prompt: Prompt, now_s: float) -> str:
        """Mode deferred, the second question."""
        hits = self.index.hits(self.heads.known(prompt))
        choice = self.policy.choose(
            RouteQuestion(
                request_id=job.key, model="m", prompt_bytes=prompt.size, prompt_tokens=job.ask.tokens, prefills=(),
                decodes=self._views("decode", now_s, hits), conversation=job.ask.session, head=prompt.head,
                asked="deferred", part="decode",
            )
        )  # fmt: skip
        self.fleet.sent(choice.decode_id)
        return choice.decode_id

    def due(self, now_s: float) -> list[Post]:
        """Engines to be asked for their caches."""
        return self.index.due(now_s)

    def hear(self, posts: Iterable[Post], now_s: float) -> list[PromptMapped]:
        """What the bus brings; returns what other routers are told of it."""
        told: list[PromptMapped] = []
        for post in posts:
            match post.message:
                case LoadReported():
                    self.fleet.load_seen(post.message, now_s)
                case BlocksStored() | BlocksRemoved() | CacheCleared():
                    self.index.receive(post.message)
                case PromptMapped():
                    self.heads.told(post.message)
                case PromptHashed():
                    prompt = self._sent.pop(post.message.transfer_id, None)
                    mapped = self.heads.learn(prompt, post.message) if prompt is not None else None
                    told += [mapped] if mapped is not None else []
                case _:
                    pass
        return told

    def _views(self, role: Role, now_s: float, hits: Mapping[str, int]) -> list[EngineView]:
        return [self._view(engine, now_s, hits) for engine in self.fleet.alive(role)]

    def _view(self, engine: Engine, now_s: float, hits: Mapping[str, int]) -> EngineView:
        name = engine.engine_id
        return engine.view(now_s, hits.get(name, 0), self.index.state(name) or "")

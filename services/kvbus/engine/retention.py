"""The conversations whose blocks a decode engine keeps: how long, how many, and who gets them.

    HELD ──ordered──► SERVING ──ranks quiet──► gone
      │ expired, evicted, superseded, released
      ▼
    gone (ReuseWithdrawn, except where the other side said it)

The oldest offer goes first when memory is short. What is being written to somebody is never let go before the ranks
are quiet. A core: facts and the time in, `Freed` out; the shell owns vLLM's block pool.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvbus.engine.chain import chain_of
from kvbus_schemas import Post, ReuseOffered, ReuseWithdrawn

REUSE = "reuse"
"""The receiver of what decode engines tell the reuse process."""
SUPERSEDED_S = 1.0
"""How long the offer of a conversation's turn outlives that of the next one: a turn that is over soon ends before its
prefill, for which the older one was claimed, has come to order it."""

SERVED_MAX = 4096
"""Transfers that are remembered after their end."""

Reason = Literal["expired", "evicted", "taken", "released", "restarted"]


@dataclass
class Held:
    """One offer: the blocks of a finished turn."""

    offer_id: str
    conversation: str
    block_ids: list[int]
    token_count: int
    expires_s: float
    transfer_id: str = ""
    """The transfer that takes it, once ordered."""


@dataclass
class Freed:
    """What has to happen now."""

    block_ids: list[int] = field(default_factory=list)
    """Give these references back to the pool."""
    posts: list[Post] = field(default_factory=list)

    def add(self, more: "Freed") -> None:
        self.block_ids += more.block_ids
        self.posts += more.posts


class Retention:
    """All offers of one engine. `blocks_max` blocks at the most, each offer for `ttl_s` from the end of its turn."""

    def __init__(
        self, me: str, incarnation: str, *, block_size: int, compat_hash: str = "", ttl_s: float, blocks_max: int
    ) -> None:
        self.me, self.incarnation = me, incarnation
        self.block_size, self.compat_hash = block_size, compat_hash
        self.ttl_s, self.blocks_max = ttl_s, blocks_max
        self.offers: dict[str, Held] = {}
        self.by_conversation: dict[str, str] = {}
        self.serving: dict[str, str] = {}
        self._superseded: dict[str, float] = {}
        """Until when the offers of earlier turns are still kept."""
        self.served: dict[str, None] = {}
        """Transfers that are over: a repeat of their order changes nothing."""
        self._references: Counter[int] = Counter()
        """How many offers keep a block: conversations with a common beginning share its blocks."""
        self._seq = 0

    @property
    def blocks(self) -> int:
        """Blocks that are kept, each counted once."""
        return len(self._references)

    def keep(self, conversation: str, tokens: Sequence[int], block_ids: list[int], now_s: float) -> Freed:
        """A turn has ended and the pool has a reference more on each of its blocks: offer them.

        `tokens` are those whose KV exists. The conversation's older offer goes soon, and the oldest of all until there
        is room; an offer that is larger than the room is not kept at all.
        """
        if len(block_ids) > self.blocks_max:
            return Freed(list(block_ids))
        freed, older = Freed(), self.by_conversation.get(conversation)
        if older is not None:
            self._superseded[older] = now_s + SUPERSEDED_S
        while self.blocks + sum(block_id not in self._references for block_id in block_ids) > self.blocks_max:
            more = self.evict_oldest()
            if not more.block_ids:
                freed.block_ids += block_ids
                return freed
            freed.add(more)
        self._seq += 1
        offer_id = f"{self.incarnation}-{self._seq}"
        self.offers[offer_id] = Held(offer_id, conversation, block_ids, len(tokens), now_s + self.ttl_s)
        self.by_conversation[conversation] = offer_id
        self._references.update(block_ids)
        freed.posts.append(Post(REUSE, self._offer(self.offers[offer_id], tokens)))
        return freed

    def order(self, offer_id: str, transfer_id: str, token_count: int, now_s: float) -> Held | None:
        """A transfer takes the offer; None when it is not (or no longer) there for it."""
        held = self.offers.get(offer_id)
        if held is None or token_count > held.token_count or now_s >= held.expires_s:
            return None
        if held.transfer_id not in ("", transfer_id):
            return None
        held.transfer_id = transfer_id
        self.serving[transfer_id] = offer_id
        return held

    def quiet(self, transfer_id: str) -> Freed:
        """Nothing of the transfer is in flight any more: its blocks go back."""
        offer_id = self.serving.pop(transfer_id, "")
        self.served[transfer_id] = None
        if len(self.served) > SERVED_MAX:
            del self.served[next(iter(self.served))]
        return self._let_go(offer_id, None, served=True)

    def release(self, offer_id: str) -> Freed:
        """Nobody wants the offer any more."""
        return self._let_go(offer_id, None)

    def evict_oldest(self) -> Freed:
        """Memory is short: the oldest offer that nobody is taking goes, those first that are to go anyhow."""
        for offer_id in self._superseded:
            if not self.offers[offer_id].transfer_id:
                return self._let_go(offer_id, None)
        for held in self.offers.values():
            if not held.transfer_id:
                return self._let_go(held.offer_id, "evicted")
        return Freed()

    def tick(self, now_s: float) -> Freed:
        """Offers end `ttl_s` after their turn, whatever has happened since, or soon after a newer one."""
        freed = Freed()
        for offer_id, until_s in list(self._superseded.items()):
            if now_s >= until_s:
                freed.add(self._let_go(offer_id, None))
        for held in list(self.offers.values()):
            if now_s < held.expires_s:
                break  # they expire in the order of their turns
            if not held.transfer_id:
                freed.add(self._let_go(held.offer_id, "expired"))
        return freed

    def due(self, now_s: float) -> bool:
        """Whether `tick` has something to do, or ranks are still writing."""
        if self.serving or any(now_s >= until_s for until_s in self._superseded.values()):
            return True
        first = next((held for held in self.offers.values() if not held.transfer_id), None)
        return first is not None and now_s >= first.expires_s

    def _let_go(self, offer_id: str, reason: Reason | None, *, served: bool = False) -> Freed:
        held = self.offers.get(offer_id)
        if held is None or (held.transfer_id and not served):
            return Freed()
        del self.offers[offer_id]
        self._superseded.pop(offer_id, None)
        if self.by_conversation.get(held.conversation) == offer_id:
            del self.by_conversation[held.conversation]
        self._forget(held.block_ids)
        freed = Freed(block_ids=held.block_ids)
        if reason is not None:
            withdrawn = ReuseWithdrawn(
                conversation=held.conversation,
                offer_id=offer_id,
                engine_id=self.me,
                reason=reason,
                blocks=len(held.block_ids),
            )
            freed.posts.append(Post(REUSE, withdrawn))
        return freed

    def _forget(self, block_ids: list[int]) -> None:
        for block_id in block_ids:
            self._references[block_id] -= 1
            if not self._references[block_id]:
                del self._references[block_id]

    def _offer(self, held: Held, tokens: Sequence[int]) -> ReuseOffered:
        return ReuseOffered(
            conversation=held.conversation,
            offer_id=held.offer_id,
            offer_seq=self._seq,
            engine_id=self.me,
            block_count=len(held.block_ids),
            block_size=self.block_size,
            token_count=held.token_count,
            chain=chain_of(held.conversation, tokens, self.block_size),
            remaining_s=self.ttl_s,
            compat_hash=self.compat_hash,
        )

"""Why a prefill does not take the conversation that was claimed for it: said to the router, and to whoever holds it."""

from typing import Any

import pytest
from tests.engine_world import StillLink, card, request, side_of, ticket

from kvbus.engine.chain import chain_of
from kvbus.engine.scheduler import SchedulerSide
from kvbus_schemas import ReuseGrant, ReuseReleased

CONVERSATION = "c" * 32
HELD = 200


def grant_of(tokens: list[int], **changes: Any) -> ReuseGrant:
    fields: dict[str, Any] = {
        "transfer_id": "b" * 32, "offer_id": "o", "holder_id": "d0", "holder_incarnation": "i1",
        "conversation": CONVERSATION, "token_count": len(tokens), "block_size": 4,
        "chain": chain_of(CONVERSATION, tokens, 4),
    }  # fmt: skip
    return ReuseGrant(**(fields | changes))


def arrives(
    grant: ReuseGrant, *, tokens: int = 300, computed: int = 0, **changes: Any
) -> tuple[SchedulerSide, StillLink, Any]:
    """A request with a grant comes to a prefill that has `computed` tokens of it already."""
    side, link = side_of("prefill", "p0")
    side.seen(card("d0"))
    asked = request("r", ticket("produce", reuse=grant, conversation=CONVERSATION).to_params(), tokens=tokens)
    for name, value in changes.items():
        setattr(asked, name, value)
    link.up = changes.get("up", True)
    side.on_new_request(asked)
    assert side.matched_tokens(asked, computed) == (0, False)
    side.allocated(asked, (list(range(80)),), 0)
    return side, link, asked


OWN = list(range(HELD))


@pytest.mark.parametrize(
    ("grant", "given", "reason"),
    [
        (grant_of(OWN), {"computed": 140}, "not_needed"),
        (grant_of([9, *OWN[1:]]), {}, "changed"),
        (grant_of(OWN), {"tokens": 60}, "too_short"),
        (grant_of(OWN, block_size=8), {}, "incompatible"),
        (grant_of(OWN), {"lora_request": object()}, "incompatible"),
        (grant_of(OWN), {"mm_features": [object()]}, "incompatible"),
        (grant_of(OWN, holder_incarnation="i0"), {}, "engine_gone"),
        (grant_of(OWN, holder_id="d9"), {}, "engine_gone"),
        (grant_of(OWN), {"up": False}, "unavailable"),
    ],
)
def test_what_is_not_taken_is_let_go_at_once_with_the_reason(
    grant: ReuseGrant, given: dict[str, Any], reason: str
) -> None:
    side, link, asked = arrives(grant, **given)
    released = [post for post in link.posted if isinstance(post.message, ReuseReleased)]
    assert [(post.to, getattr(post.message, "reason", "")) for post in released] == [(grant.holder_id, reason)]
    side.finished(asked, (list(range(80)),))
    assert side.reply_of(asked) == {"kvbus": {"reused_tokens": 0, "reuse": reason}}
    assert len([post for post in link.posted if isinstance(post.message, ReuseReleased)]) == 1

"""What the console makes of the bus, in messages: which belong together, what is kept, what is counted."""

from typing import Any

import pytest

from kvbus.console.board import GONE_KEPT_S, Board
from kvbus.console.book import LOST_S, STRAY_S, SWEEP_EVERY, Book
from kvbus.console.core import ROWS_MAX, ConsoleCore, Filter
from kvbus.console.window import Window, quantile
from kvbus.trace.core import AmbiguousIdError, Line, stories_of
from kvbus_schemas import (
    BlocksRegistered,
    Candidate,
    DeadLetter,
    EngineCard,
    EngineView,
    LoadReported,
    Message,
    PushOrdered,
    RequestServed,
    ReuseAnswered,
    ReuseAsked,
    ReuseGrant,
    ReuseOffered,
    ReuseReleased,
    ReuseWithdrawn,
    RouteAnswered,
    RouteAsked,
    RouteDecided,
    TransferClosed,
)

T, U, REUSE, TALK = "a" * 32, "b" * 32, "c" * 32, "d" * 32
START_S = 1_700_000_000.0


def line(seq: int, message: Message, sender: str = "router-1", at_s: float = 0.0) -> Line:
    return Line(seq, START_S + at_s, sender, "all", message)  # type: ignore[arg-type]


def decided(transfer_id: str = T, request_id: str = "req-1", **changes: Any) -> RouteDecided:
    facts: dict[str, Any] = {"prefill_id": "p0", "decode_id": "d0", "policy": "p", "reason": "r", "mode": "early"}
    return RouteDecided(transfer_id=transfer_id, request_id=request_id, **(facts | changes))


def served(transfer_id: str = T, request_id: str = "req-1", **changes: Any) -> RequestServed:
    facts: dict[str, Any] = {"mode": "early", "outcome": "completed", "status": 200, "ttft_ms": 50, "duration_ms": 90}
    return RequestServed(transfer_id=transfer_id, request_id=request_id, **(facts | changes))


def registered(transfer_id: str = T, **changes: Any) -> BlocksRegistered:
    facts: dict[str, Any] = {"producer_id": "p0", "consumer_id": "d0", "request_id": "req-1", "token_count": 60}
    return BlocksRegistered(
        transfer_id=transfer_id, consumer_incarnation="1", block_ids=[[1, 2]], first_block=0, prompt_digest="f",
        block_size=32, lease_s=9, **(facts | changes),
    )  # fmt: skip


def closed(transfer_id: str = T) -> TransferClosed:
    return TransferClosed(transfer_id=transfer_id, producer_id="p0", consumer_id="d0", outcome="completed")


def grant(transfer_id: str = REUSE) -> ReuseGrant:
    return ReuseGrant(
        transfer_id=transfer_id, offer_id="o1", holder_id="d0", holder_incarnation="1", conversation=TALK,
        token_count=640, block_size=32, chain=[b"1"],
    )  # fmt: skip


def offered(engine_id: str = "d0", offer_id: str = "o1") -> ReuseOffered:
    return ReuseOffered(
        conversation=TALK, offer_id=offer_id, offer_seq=1, engine_id=engine_id, block_count=20, block_size=32,
        token_count=640, chain=[], remaining_s=480,
    )  # fmt: skip


TURN: list[Message] = [
    ReuseAsked(conversation=TALK, request_id="req-1"),
    ReuseAnswered(conversation=TALK, grant=grant(), age_s=3),
    RouteAsked(ask_id="ask1", request_id="req-1", model="m", prompt_bytes=9, engines=[], deadline_ms=20, shadow=True),
    RouteAnswered(ask_id="ask1", prefill_id="p1", decode_id="d0", reason="nearer"),
    decided(conversation=TALK),
    registered(REUSE, producer_id="d0", consumer_id="p0", reuse=True),
    closed(REUSE),
    registered(),
    closed(),
    served(conversation=TALK),
    offered(),
]
"""A turn that takes back what decode has kept, watched by a router whose answer is only compared."""


def told(core: ConsoleCore, messages: list[Message], first: int = 1) -> None:
    for number, message in enumerate(messages, first):
        core.hear(line(number, message, at_s=number / 100))


def test_what_the_book_puts_together_is_what_the_trace_puts_together() -> None:
    book = Book(100)
    lines = [line(number, message) for number, message in enumerate(TURN, 1)]
    assert all(book.hear(one) for one in lines)
    [story] = book.stories()
    assert story == stories_of(lines)[0]
    assert len(story.lines) == len(TURN)


def test_a_repeat_changes_nothing() -> None:
    core = ConsoleCore(100)
    told(core, TURN)
    before = (core.common(START_S + 9), core.finished(Filter(), START_S + 9))
    told(core, TURN, first=100)
    assert (core.common(START_S + 9), core.finished(Filter(), START_S + 9)) == before


def test_a_transfer_that_is_heard_before_its_router_becomes_one_request_with_it() -> None:
    book = Book(100)
    order = [TURN[0], TURN[1], closed(), TURN[4], ReuseReleased(
        conversation=TALK, offer_id="o1", transfer_id=REUSE, reason="spare")]  # fmt: skip
    for number, message in enumerate(order, 1):
        book.hear(line(number, message))
    [story] = book.stories()
    assert len(story.lines) == len(order)
    assert len(book) == 1


def test_a_client_that_uses_a_request_id_twice_has_two_requests() -> None:
    book = Book(100)
    for number, message in enumerate([decided(), served(), decided(U), served(U)], 1):
        book.hear(line(number, message))
    assert len(book) == 2
    assert [story.transfer_id for story in book.stories()] == [T, U]


def test_a_retried_dispatch_is_over_and_its_request_runs_on() -> None:
    core = ConsoleCore(100)
    told(core, [decided(), served(outcome="retried", status=502), decided(U, attempt=2)])
    now_s = START_S + 1
    assert [row["id"] for row in core.common(now_s)["running"]["rows"]] == [U]
    assert [(row["id"], row["outcome"]) for row in core.finished(Filter(), now_s)["rows"]] == [(T, "retried")]
    found = core.dispatch(U, core.book.lines_of(U))
    assert found is not None
    assert [one["attempt"] for one in found["attempts"]] == [1, 2]


@pytest.mark.parametrize(
    ("messages", "stage"),
    [
        ([decided()], "routed"),
        ([decided(), registered()], "prefill"),
        ([decided(), registered(), closed()], "decode"),
    ],
)
def test_a_running_transfer_says_what_it_waits_for(messages: list[Message], stage: str) -> None:
    core = ConsoleCore(100)
    told(core, messages)
    assert [row["stage"] for row in core.common(START_S + 1)["running"]["rows"]] == [stage]


def test_what_nobody_will_end_does_not_run_for_ever() -> None:
    core = ConsoleCore(100)
    told(core, [decided(), closed(U)])
    assert core.common(START_S + STRAY_S + 1)["running"]["count"] == 1, "no router spoke of the other one"
    assert core.common(START_S + LOST_S + 1)["running"]["count"] == 0
    assert core.finished(Filter(), START_S + LOST_S + 1)["count"] == 2


def test_the_newest_are_kept_and_older_ones_that_went_wrong() -> None:
    book = Book(10)
    for number in range(10 + SWEEP_EVERY + 1):
        transfer, request = f"{number:032d}", f"req-{number}"
        book.hear(line(2 * number + 1, decided(transfer, request)))
        outcome = "failed" if number == 3 else "completed"
        book.hear(line(2 * number + 2, served(transfer, request, outcome=outcome)))
    kept = [story.request_id for story in book.stories()]
    assert len(kept) == 11
    assert kept[0] == "req-3"
    assert book.lines_of(f"{1:032d}") == []
    assert book.lines_of(f"{3:032d}") != []


def test_filters_are_those_of_the_trace_and_the_rest_is_counted() -> None:
    core = ConsoleCore(1000)
    for number in range(ROWS_MAX + 20):
        transfer, request = f"{number:032d}", f"req-{number}"
        slow = {"ttft_ms": 900} if number == 7 else {}
        told(
            core,
            [decided(transfer, request, decode_id=f"d{number % 2}"), served(transfer, request, **slow)],
            2 * number,
        )
    assert core.finished(Filter(), START_S)["count"] == ROWS_MAX + 20
    assert len(core.finished(Filter(), START_S)["rows"]) == ROWS_MAX
    assert core.finished(Filter(engine="d1"), START_S)["count"] == (ROWS_MAX + 20) // 2
    assert [row["request"] for row in core.finished(Filter(slow_ms=500), START_S)["rows"]] == ["req-7"]
    assert core.finished(Filter(outcome="failed"), START_S)["rows"] == []


def test_a_dispatch_is_shown_with_reuse_decision_and_the_answers_that_are_only_compared() -> None:
    core = ConsoleCore(100)
    candidates = [
        Candidate(engine_id="p1", role="prefill", score=-2, terms={"waiting": -2}, load_age_ms=40),
        Candidate(engine_id="p0", role="prefill", score=-1, terms={"waiting": -1}, load_age_ms=30),
    ]
    views = [EngineView(engine_id="p0", role="prefill", running=1, waiting=2, free_blocks=3)]
    told(core, [*TURN[:4], decided(conversation=TALK, candidates=candidates, engines=views), *TURN[5:]])
    found = core.dispatch(T, core.book.lines_of(T))
    assert found is not None
    assert found["reuse"] == {"word": "hit", "why": "from d0, 3.0 s old", "tokens": 640}
    [decision] = found["decisions"]
    assert [(one["id"], one["chosen"], one["known"]) for one in decision["candidates"]] == [
        ("p0", True, "1 running, 2 waiting, 3 blocks free"),
        ("p1", False, ""),
    ]
    [answer] = found["answers"]
    assert (answer["shadow"], answer["same"], answer["reason"]) == (True, False, "nearer")
    shares = [stage["share"] for stage in found["stages"]]
    assert sum(shares) <= 1.001
    assert len(found["lines"]) == len(TURN)


@pytest.mark.parametrize(
    ("messages", "word", "why"),
    [
        ([decided(), served()], "", ""),
        ([TURN[0], ReuseAnswered(conversation=TALK, miss="engine_gone"), decided(conversation=TALK)], "miss",
         "engine gone"),
        ([TURN[0], decided(conversation=TALK), served()], "miss", "no answer in time"),
        ([*TURN[:2], decided(), ReuseReleased(conversation=TALK, offer_id="o", transfer_id=REUSE, reason="not_needed")],
         "released", "not needed"),
    ],
)  # fmt: skip
def test_reuse_is_told_with_its_reason(messages: list[Message], word: str, why: str) -> None:
    core = ConsoleCore(100)
    told(core, messages)
    found = core.dispatch(T, core.book.lines_of(T))
    assert found is not None
    assert (found["reuse"]["word"], found["reuse"]["why"]) == (word, why)


def test_a_conversation_is_its_turns_in_order_and_is_found_by_the_beginning_of_its_id() -> None:
    core = ConsoleCore(100)
    told(core, TURN)
    told(core, [decided(U, "req-2", conversation=TALK), served(U, "req-2", conversation=TALK)], first=50)
    talk = core.conversation(TALK)
    assert talk is not None
    assert [turn["id"] for turn in talk["turns"]] == [T, U]
    assert talk["turns"][0]["kept"] == "keeps 20 blocks, 640 tokens, for 480 s"
    assert core.find("dddd") == {"kind": "conversation", "id": TALK}
    assert core.find("req-2") == {"kind": "transfer", "id": U}
    assert core.find("nobody") is None
    assert core.conversation("nobody") is None
    with pytest.raises(AmbiguousIdError):
        core.find("req")


def card(engine_id: str = "d0", incarnation: str = "1", **changes: Any) -> EngineCard:
    facts: dict[str, Any] = {"role": "decode", "model": "tiny", "http_url": "http://d", "block_size": 32}
    return EngineCard(engine_id=engine_id, num_blocks=100, incarnation=incarnation, **(facts | changes))


def load(engine_id: str = "d0", **changes: Any) -> LoadReported:
    facts: dict[str, Any] = {"running": 1, "waiting": 2, "free_blocks": 70, "total_blocks": 100, "held_blocks": 20}
    return LoadReported(engine_id=engine_id, **(facts | changes))


def test_an_engine_is_alive_then_draining_then_gone_and_then_forgotten() -> None:
    board = Board()
    states = []
    for sign in (card(), card(draining=True), None):
        if sign is None:
            board.card_gone("d0", START_S)
        else:
            board.card(sign)
        states.append(board.engines(START_S)[0]["state"])
    assert states == ["alive", "draining", "gone"]
    assert board.engines(START_S + GONE_KEPT_S + 1) == []


def test_an_engine_shows_its_load_and_the_conversations_that_it_holds_now() -> None:
    board = Board()
    board.card(card())
    board.hear(line(1, load(), "d0", at_s=5))
    board.hear(line(2, load(running=9), "d0", at_s=4))
    held = []
    for number, message in enumerate(
        (offered(), offered(offer_id="o2"), offered(offer_id="o3"),
         ReuseWithdrawn(conversation=TALK, offer_id="o2", engine_id="d0", reason="evicted"),
         ReuseAnswered(conversation=TALK, grant=grant())), 3,
    ):  # fmt: skip
        board.hear(line(number, message, "d0"))
        held.append(board.engines(START_S)[0]["held"])
    assert held == [1, 2, 3, 2, 1]
    row = board.engines(START_S)[0]
    assert (row["running"], row["waiting"], row["free"], row["total"], row["held_blocks"]) == (1, 2, 70, 100, 20)
    assert row["load_at"] == START_S + 5, "an older report does not replace a newer one"
    assert board.engines(START_S + 481)[0]["held"] == 0, "offers end by themselves"
    board.hear(line(9, offered(), "d0"))
    board.card(card(incarnation="2"))
    assert board.engines(START_S)[0]["held"] == 0, "what it held went with the process"


def test_every_other_process_is_known_by_what_it_says_and_ranks_are_not_among_them() -> None:
    board = Board()
    board.card(card("p0", role="prefill"))
    ordered = PushOrdered(
        transfer_id=T, producer_id="p0", consumer_id="d0", consumer_incarnation="1", block_ids=[[1]], first_block=0,
        token_count=9, prompt_digest="f", lease_s=9,
    )  # fmt: skip
    said = [
        (decided(), "router-1"),
        (ordered, "matcher-1"),
        (TURN[1], "reuse-1"),
        (TURN[3], "policy-1"),
        (closed(), "p0-r0"),
    ]
    for number, (message, sender) in enumerate(said, 1):
        board.hear(line(number, message, sender))
    assert [(row["id"], row["kind"]) for row in board.processes(START_S)] == [
        ("matcher-1", "matcher"), ("policy-1", "policy"), ("reuse-1", "reuse"), ("router-1", "router"),
    ]  # fmt: skip


def test_engines_are_in_the_order_in_which_people_count() -> None:
    board = Board()
    for name, role in (("decode-0", "decode"), ("prefill-10", "prefill"), ("prefill-2", "prefill")):
        board.card(card(name, role=role))
    assert [row["id"] for row in board.engines(START_S)] == ["prefill-2", "prefill-10", "decode-0"]


def test_totals_are_of_the_last_minute_and_reuse_of_the_last_ten() -> None:
    window = Window()
    for second in range(30):
        window.served(START_S + second, 10.0 + second, failed=second == 0)
    window.reuse(START_S - 300, "expired")
    window.reuse(START_S, "hit")
    totals = window.totals(START_S + 40)
    assert (totals["served"], totals["failed"], totals["per_s"]) == (30, 1, 0.5)
    assert (totals["ttft_p50_ms"], totals["ttft_p99_ms"]) == (25.0, 39.0)
    assert totals["reuse"] == [("hit", 1), ("expired", 1)]
    assert totals["reuse_hit_share"] == 0.5
    assert window.totals(START_S + 2000)["ttft_p50_ms"] is None
    assert window.totals(START_S + 2000)["reuse_hit_share"] is None


def test_quantiles_are_nearest_ranks() -> None:
    assert [quantile([1.0, 2.0, 3.0, 4.0], share) for share in (0.0, 0.5, 0.99)] == [1.0, 3.0, 4.0]
    assert quantile([], 0.5) is None


def test_dead_letters_are_counted_and_the_newest_shown() -> None:
    core = ConsoleCore(10)
    for number in range(30):
        core.dead_letter(DeadLetter(source="d0", subject="s", reason=f"{number}", size_bytes=3), START_S)
    letters = core.common(START_S)["letters"]
    assert letters["count"] == 30
    assert len(letters["rows"]) == 20
    assert letters["rows"][0]["reason"] == "29"

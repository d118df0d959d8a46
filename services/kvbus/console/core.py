"""What the page shows, out of what the bus says. Pure: lines and the time in, sections of the page out."""

from collections.abc import Iterator
from typing import Any

import msgspec

from kvbus.console.board import Board
from kvbus.console.book import Book
from kvbus.console.views import detail, finished_row, running_row, turn
from kvbus.console.window import HIT, Window
from kvbus.trace.core import Line, Story, matching, named, stories_of
from kvbus_schemas import DeadLetter, RequestServed, ReuseAnswered

ROWS_MAX = 100
"""Rows of a table of transfers; how many there are besides is said."""
TURNS_MAX = 200
LETTERS_MAX = 20
TEXT_CHARS_MAX = 300

Json = dict[str, Any]


class Filter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which finished transfers a browser wants to see."""

    outcome: str = ""
    engine: str = ""
    slow_ms: float = 0.0


class ConsoleCore:
    """Everything that the page knows. Times are seconds since 1970 on the server's clock."""

    def __init__(self, requests_max: int) -> None:
        self.book = Book(requests_max)
        self.board = Board()
        self.window = Window()
        self.dead_letters = 0
        self.letters: list[Json] = []

    def hear(self, line: Line) -> None:
        """Take what was said; a repeat changes nothing."""
        if not self.book.hear(line):
            return
        self.board.hear(line)
        match line.message:
            case RequestServed(outcome=outcome) if outcome != "retried":
                self.window.served(line.at_s, line.message.ttft_ms, failed=outcome == "failed")
            case ReuseAnswered(grant=grant, miss=miss):
                self.window.reuse(line.at_s, HIT if grant is not None else miss or "unknown")
            case _:
                pass

    def dead_letter(self, letter: DeadLetter, now_s: float) -> None:
        """Somebody could not take some bytes."""
        self.dead_letters += 1
        words = {name: getattr(letter, name)[:TEXT_CHARS_MAX] for name in ("source", "subject", "reason")}
        self.letters = [words | {"at": round(now_s, 3)}, *self.letters][:LETTERS_MAX]

    def common(self, now_s: float) -> Json:
        """The sections that are the same for every browser."""
        running = self.book.running(now_s)
        totals = self.window.totals(now_s) | {"running": len(running)}
        return {
            "totals": totals,
            "engines": self.board.engines(now_s),
            "processes": self.board.processes(now_s),
            "running": {"count": len(running), "rows": [running_row(story) for story in running[:ROWS_MAX]]},
            "letters": {"count": self.dead_letters, "rows": self.letters},
        }

    def finished(self, wanted: Filter, now_s: float) -> Json:
        """Finished transfers that a browser wants, newest first."""
        over = self.book.finished(now_s)
        found = matching(over, engine_id=wanted.engine, outcome=wanted.outcome, slow_ms=wanted.slow_ms)
        return {"count": len(found), "of": len(over), "rows": [finished_row(story) for story in found[:ROWS_MAX]]}

    def dispatch(self, transfer_id: str, lines: list[Line]) -> Json | None:
        """All about one dispatch out of the lines of its request; None if it is not among them."""
        stories = stories_of(lines)
        story = next((story for story in stories if story.transfer_id == transfer_id), None)
        if story is None:
            return None
        others = [{"id": one.transfer_id, "attempt": one.attempt, "outcome": one.outcome} for one in stories]
        return detail(story) | {"attempts": others if len(others) > 1 else []}

    def conversation(self, conversation: str) -> Json | None:
        """The turns of a conversation, oldest first; None if none is known."""
        turns = self.book.turns(conversation)
        if not turns:
            return None
        shown = turns[-TURNS_MAX:]
        return {"id": conversation, "count": len(turns), "turns": [turn(story) for story in shown]}

    def find(self, given: str) -> Json | None:
        """Where the page shows what has this id, or the only one that begins so: a dispatch or a conversation. Raises
        AmbiguousIdError."""
        found = named(list(self._known()), given)
        if not found:
            return None
        if all(story.conversation.startswith(given) for story in found):
            return {"kind": "conversation", "id": found[0].conversation}
        return {"kind": "transfer", "id": found[-1].transfer_id}

    def _known(self) -> Iterator[Story]:
        return self.book.stories()

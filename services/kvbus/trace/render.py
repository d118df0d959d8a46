"""Stories on a terminal, and as plain lines everywhere else."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvbus.trace.core import Line, Story
from kvbus.trace.opinions import Opinion, opinions_of
from kvbus.trace.phrases import milliseconds, phrase_of, printable
from kvbus.trace.split import split_of
from kvbus_schemas import Candidate, RouteDecided

LIST_HEAD = ("TIME", "REQUEST", "TRANSFER", "MODE", "PREFILL", "DECODE", "OUTCOME", "TTFT", "MESSAGES")
SHOW_HEAD = ("MS", "FROM", "TO", "WHAT")
STAGE_HEAD = ("MS", "TOOK", "SHARE", "STAGE")
WHY_HEAD = ("ROLE", "ENGINE", "SCORE", "LOAD AGE", "", "TERMS")
ASKED_HEAD = ("ASKED", "AS", "ANSWER", "AFTER", "", "REASON")
SHORT_CHARS = 12
_COLOURS = {
    "completed": "green",
    "failed": "red",
    "expired": "red",
    "cancelled": "yellow",
    "open": "cyan",
    "chosen": "green",
    "used": "green",
    "agrees": "green",
    "differs": "yellow",
    "late": "red",
    "no answer": "red",
    "not used": "red",
}
_NUMBERS = {"SCORE", "LOAD AGE", "MS", "TOOK", "SHARE", "TTFT", "MESSAGES"}


def show_list(console: Console, stories: Sequence[Story]) -> None:
    """One row for each story."""
    _table(console, LIST_HEAD, [_row(story, full=not console.is_terminal) for story in stories])


def show_story(console: Console, story: Story) -> None:
    """The timeline of one dispatch, then where its time went."""
    again = f", attempt {story.attempt}" if story.attempt > 1 else ""
    console.print(
        f"request {story.request_id or '?'}  transfer {story.transfer_id}  {story.mode or '?'}  {story.outcome}{again}",
        highlight=False,
        soft_wrap=True,
    )
    rows = [(f"{_offset(story, line):.2f}", line.sender, line.to, phrase_of(line.message)) for line in story.lines]
    _table(console, SHOW_HEAD, rows)
    stages = story.stages()
    if len(stages) > 1:
        console.print()
        _table(console, STAGE_HEAD, stage_rows(story))
    split = split_of(story)
    if split is not None:
        parts = " + ".join(f"{name} {took_ms:.1f}" for name, took_ms in split.stages.items())
        console.print(f"\nfirst byte after {split.ttft_ms:.1f} ms = {parts}", highlight=False)


def show_why(console: Console, story: Story) -> None:
    """Every routing decision of a dispatch: what was chosen, why, and how all candidates stood at that moment."""
    for line in story.lines:
        decided = line.message
        if isinstance(decided, RouteDecided):
            head = f"request {decided.request_id}  {phrase_of(decided)}"
            console.print(head, highlight=False, markup=False, soft_wrap=True)
            rows = [_candidate_row(candidate, decided) for candidate in ranked(decided)]
            if rows:
                _table(console, WHY_HEAD, rows)
            asked = [_opinion_row(opinion) for opinion in opinions_of(story, line)]
            if asked:
                _table(console, ASKED_HEAD, asked)


def _opinion_row(opinion: Opinion) -> tuple[str, ...]:
    after = milliseconds(opinion.after_ms) if opinion.answer else "-"
    reason = opinion.answer.reason if opinion.answer else ""
    return (opinion.router, opinion.part, opinion.said, after, opinion.verdict, printable(reason))


def ranked(decided: RouteDecided) -> list[Candidate]:
    """The candidates of a decision, by role, the best first."""
    return sorted(decided.candidates, key=lambda candidate: (candidate.role != "prefill", -candidate.score))


def _candidate_row(candidate: Candidate, decided: RouteDecided) -> tuple[str, ...]:
    chosen = candidate.engine_id == (decided.prefill_id if candidate.role == "prefill" else decided.decode_id)
    terms = ", ".join(f"{name} {value:g}" for name, value in candidate.terms.items())
    age = milliseconds(candidate.load_age_ms) if candidate.load_age_ms else "-"
    return (candidate.role, candidate.engine_id, f"{candidate.score:g}", age, "chosen" if chosen else "", terms)


def stage_rows(story: Story) -> list[tuple[str, str, str, str]]:
    """Each stage with its share of the time up to the first byte, or to the last stage; the longest are marked."""
    return [
        (
            f"{stage.at_ms:.2f}",
            f"{stage.took_ms:.2f}",
            f"{share:.0%}",
            stage.name + ("  <- critical" if critical else ""),
        )
        for stage, share, critical in story.shares()
    ]


def live_line(line: Line) -> str:
    """A message as `tail` prints it."""
    when = datetime.fromtimestamp(line.at_s).astimezone().strftime("%H:%M:%S.%f")[:-3]
    return f"{when}  {line.message.key[:SHORT_CHARS]:12}  {line.sender} -> {line.to}  {phrase_of(line.message)}"


def summary(story: Story) -> dict[str, Any]:
    """A story as `ls --json` prints it."""
    return {
        "time_unix_s": round(story.began_s, 6),
        "request_id": story.request_id,
        "transfer_id": story.transfer_id,
        "conversation": story.conversation,
        "mode": story.mode,
        "prefill_id": story.prefill_id,
        "decode_id": story.decode_id,
        "outcome": story.outcome,
        "status": story.status,
        "attempt": story.attempt,
        "ttft_ms": round(story.ttft_ms, 3),
        "duration_ms": round(story.duration_ms, 3),
        "messages": len(story.lines),
    }


def details(story: Story) -> dict[str, Any]:
    """A story as `show --json` prints it."""
    timeline = [
        {
            "ms": round(_offset(story, line), 3),
            "from": line.sender,
            "to": line.to,
            "type": type(line.message).__name__,
            "what": phrase_of(line.message),
        }
        for line in story.lines
    ]
    stages = [{"stage": s.name, "ms": round(s.at_ms, 3), "took_ms": round(s.took_ms, 3)} for s in story.stages()]
    split = split_of(story)
    parts = {name: round(took_ms, 3) for name, took_ms in split.stages.items()} if split else {}
    return summary(story) | {"timeline": timeline, "stages": stages, "ttft_stages_ms": parts}


def _offset(story: Story, line: Line) -> float:
    return (line.at_s - story.began_s) * 1000


def _row(story: Story, *, full: bool) -> tuple[str, ...]:
    when = datetime.fromtimestamp(story.began_s).astimezone()
    width = None if full else SHORT_CHARS
    return (
        when.isoformat(timespec="milliseconds") if full else when.strftime("%H:%M:%S.%f")[:-3],
        story.request_id[:width] or "-",
        story.transfer_id[:width],
        story.mode or "-",
        story.prefill_id or "-",
        story.decode_id or "-",
        story.outcome,
        milliseconds(story.ttft_ms) if story.ttft_ms else "-",
        str(len(story.lines)),
    )


def _table(console: Console, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if not console.is_terminal:
        for text in _aligned([head, *rows]):
            console.out(text, highlight=False)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in head:
        table.add_column(name, justify="right" if name in _NUMBERS else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell, style=_COLOURS.get(cell, "")) for cell in row))
    console.print(table)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]

"""The questions that somebody's router is asked, each with what it is about. Pure."""

from collections.abc import Iterator

import msgspec

from kvbus_schemas import EngineView, Mode, Role
from kvbus_schemas import RouteAsked as Known

PROMPT_BYTES = 2_000
BIG_PROMPT_BYTES = 8 * 1024 * 1024
ENGINES_MANY = 200
AT_ONCE = 64
TOKEN_OF_NOBODY = "nobody-asks-this-one"  # noqa: S105  (a name)


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """`asked` is what goes out, addressed to the router unless `to` names somebody else."""

    name: str
    about: str
    """What is checked, for people."""
    asked: Known
    advice: str
    """What to do where it fails."""
    to: str = ""
    answers: int = 1
    """How many answers are right: none to a question that is not for this router, or that nobody can read."""


class RouteAsked(Known, frozen=True, kw_only=True, tag="RouteAsked"):
    """As a later kvbus may send it."""

    not_known_yet: dict[str, int] = {}


def newer(asked: Known) -> Known:
    """The question with a field that no router of today knows."""
    return RouteAsked(**msgspec.structs.asdict(asked), not_known_yet={"anything": 1})


def _unknown_kind() -> type[Known]:
    class RouteAsked(Known, frozen=True, kw_only=True, tag="RouteAskedDifferently"):
        """On the subject of a question, and none."""

    return RouteAsked


def views(role: Role, count: int, *, busy_first: bool = False) -> list[EngineView]:
    """So many engines of a role; the first may be busy."""
    return [
        EngineView(
            engine_id=f"{role}-{number}",
            role=role,
            running=9 if busy_first and number == 0 else number % 3,
            free_blocks=500,
            total_blocks=1000,
            load_age_ms=12.5,
        )
        for number in range(count)
    ]


PAIR = [*views("prefill", 1), *views("decode", 1)]
SOME = [*views("prefill", 3, busy_first=True), *views("decode", 3, busy_first=True)]


class Maker:
    """Makes questions with ids of their own."""

    def __init__(self, ids: Iterator[str], deadline_ms: float) -> None:
        self._ids = ids
        self._deadline_ms = deadline_ms

    def ask(self, engines: list[EngineView], **given: object) -> Known:
        """A question about these engines."""
        fields: dict[str, object] = {
            "ask_id": next(self._ids),
            "request_id": next(self._ids),
            "transfer_id": next(self._ids),
            "model": "tiny",
            "prompt_bytes": PROMPT_BYTES,
            "engines": engines,
            "deadline_ms": self._deadline_ms,
        }
        return Known(**(fields | given))  # type: ignore[arg-type]

    def simple(self) -> list[Question]:
        """One question at a time."""
        return [*self._engines(), *self._modes(), *self._content(), *self._reading()]

    def burst(self) -> list[Question]:
        """AT_ONCE questions, to be asked in one go."""
        return [
            Question(
                name="burst",
                about=f"{AT_ONCE} questions at once, each answered within the deadline",
                asked=self.ask(SOME),
                advice="answer in the order of arrival without waiting for anything; keep a question to microseconds",
            )
            for _ in range(AT_ONCE)
        ]

    def _engines(self) -> list[Question]:
        offered = "choose among `engines` only: prefill_id a prefill, decode_id a decode"
        return [
            Question(name="pair", about="one prefill and one decode", asked=self.ask(PAIR), advice=offered),
            Question(name="some", about="three of each", asked=self.ask(SOME), advice=offered),
            Question(
                name="many",
                about=f"{ENGINES_MANY} engines",
                asked=self.ask([*views("prefill", ENGINES_MANY // 2), *views("decode", ENGINES_MANY // 2)]),
                advice="a large fleet must not take longer than the deadline",
            ),
            Question(
                name="no_prefill",
                about="no prefill engine: mode local",
                asked=self.ask(views("decode", 2)),
                advice="without a prefill in `engines` answer mode local, prefill_id empty",
            ),
            Question(
                name="retry",
                about="the second attempt of a request",
                asked=self.ask(SOME, attempt=2),
                advice="a request may be asked about again: engines that failed it are no longer in `engines`",
            ),
        ]

    def _modes(self) -> list[Question]:
        modes: tuple[Mode, ...] = ("early", "deferred", "local", "pull")
        named = [
            Question(
                name=f"mode_{mode}",
                about=f"the client asks for mode {mode}",
                asked=self.ask(SOME, asked=mode),
                advice=f"`asked` is {mode}: answer with that mode (local without a prefill_id)",
            )
            for mode in modes
        ]
        second = Question(
            name="deferred_decode",
            about="mode deferred, prefill is done: a decode is wanted",
            asked=self.ask(views("decode", 3), asked="deferred", part="decode"),
            advice="`part` is decode: answer mode deferred, prefill_id empty, decode_id one of `engines`",
        )
        return [*named, second]

    def _content(self) -> list[Question]:
        return [
            Question(
                name="big_prompt",
                about="a prompt of 8 MiB",
                asked=self.ask(SOME, prompt_bytes=BIG_PROMPT_BYTES),
                advice="`prompt_bytes` has no small limit",
            ),
            Question(
                name="conversation",
                about="a conversation that nobody knows",
                asked=self.ask(SOME, conversation=next(self._ids)),
                advice="`conversation` is an opaque key; an unknown one is a new conversation",
            ),
            Question(
                name="unicode",
                about="names in other scripts",
                asked=self.ask(SOME, model="模型-é-🙂", request_id="θ-1"),
                advice="strings are UTF-8",
            ),
            Question(
                name="shadow",
                about="a shadow question, to all who listen",
                asked=self.ask(SOME, shadow=True),
                to="all",
                advice="listen on kvbus.v1.route.route_asked.*.all.* too, and answer as if it counted",
            ),
        ]

    def _reading(self) -> list[Question]:
        different = _unknown_kind()
        return [
            Question(
                name="unknown_field",
                about="a field that is not known yet",
                asked=newer(self.ask(SOME)),
                advice="ignore the fields of a map that you do not know",
            ),
            Question(
                name="unknown_type",
                about="a message of an unknown type is left alone",
                asked=different(**msgspec.structs.asdict(self.ask(SOME))),
                advice="look at `type` first, and ignore what is not RouteAsked",
                answers=0,
            ),
            Question(
                name="for_another",
                about="a question for somebody else is left alone",
                asked=self.ask(SOME),
                to=TOKEN_OF_NOBODY,
                advice="subscribe to your own name and `all`, not to kvbus.v1.route.route_asked.>",
                answers=0,
            ),
            Question(
                name="still_there",
                about="and it still answers after all that",
                asked=self.ask(PAIR),
                advice="nothing that comes in may end the process",
            ),
        ]

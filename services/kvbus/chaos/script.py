"""What the steady load asks: conversations of one or several turns, by seed. Pure."""

from typing import Any, Literal

import msgspec

from kvbus.chaos.dice import Dice

TOKENS_FROM, TOKENS_TO = 3, 250
"""The seeded models' ordinary tokens; light engines take the same."""
WORDS = (
    "block",
    "bus",
    "decode",
    "lease",
    "offer",
    "prefill",
    "rank",
    "stream",
    "ticket",
    "token",
    "transfer",
    "write",
)
CHATS_OF_10 = 4
LENGTHS = ((8, 40), (60, 200), (200, 500), (500, 1100))
"""Tokens of an opening, from and to; each is drawn as often as the others."""
TURNS = (1, 1, 1, 2, 3)
ANSWERS = (1, 8, 16, 24)
LONG_TOKENS, LONG_ANSWER = 2400, 16
"""Of the requests that exhaust an engine's blocks."""
CUT_TOKENS, CUT_ANSWER = 700, 64
"""Of the requests whose client leaves."""

Use = Literal["steady", "long", "cut"]


class Turn(msgspec.Struct, frozen=True):
    """What a client adds, and how many tokens it wants."""

    adds: list[int] | str
    max_tokens: int


class Said(msgspec.Struct, frozen=True):
    """An answer."""

    tokens: list[int]
    text: str


class Script(msgspec.Struct, frozen=True):
    """One conversation, word for word."""

    number: int
    use: Use
    chat: bool
    turns: list[Turn]

    def body(self, turn: int, answers: list[Said]) -> dict[str, Any]:
        """The request of that turn, after these answers to the turns before it."""
        body: dict[str, Any] = {
            "max_tokens": self.turns[turn].max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        if not self.chat:
            prompt: list[int] = []
            for at in range(turn + 1):
                adds = self.turns[at].adds
                assert isinstance(adds, list)
                prompt += adds
                prompt += answers[at].tokens if at < turn else []
            return body | {"prompt": prompt}
        messages = []
        for at in range(turn + 1):
            messages.append({"role": "user", "content": self.turns[at].adds})
            if at < turn:
                messages.append({"role": "assistant", "content": answers[at].text})
        return body | {"messages": messages}


def scripts(seed: int, steady: int, *, long: int = 8, cut: int = 4) -> list[Script]:
    """So many conversations of each use."""
    dice = Dice(seed, "scripts")
    made = [_steady(dice, number) for number in range(steady)]
    single: list[tuple[Use, int, int]] = [("long", LONG_TOKENS, LONG_ANSWER)] * long
    single += [("cut", CUT_TOKENS, CUT_ANSWER)] * cut
    for number, (use, length, wanted) in enumerate(single, steady):
        made += [Script(number, use, False, [Turn(_tokens(dice, length), wanted)])]
    return made


def _steady(dice: Dice, number: int) -> Script:
    chat = dice.below(10) < CHATS_OF_10
    turns = []
    for at in range(dice.one_of(TURNS)):
        length = int(dice.between(*(dice.one_of(LENGTHS) if at == 0 else LENGTHS[1])))
        adds = _text(dice, length) if chat else _tokens(dice, length)
        turns.append(Turn(adds, dice.one_of(ANSWERS)))
    return Script(number, "steady", chat, turns)


def _tokens(dice: Dice, length: int) -> list[int]:
    return [TOKENS_FROM + dice.below(TOKENS_TO - TOKENS_FROM) for _ in range(length)]


def _text(dice: Dice, length: int) -> str:
    """About `length` tokens, which are bytes."""
    text = ""
    while len(text) < length:
        text += dice.one_of(WORDS) + " "
    return text

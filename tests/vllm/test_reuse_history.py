"""Histories that change, fork, repeat and break off, on real vLLM without a prefix cache on prefill: right tokens every
time, and what is reused goes up to the first difference."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio
from tests.vllm.test_reuse import NO_CACHE, ten_turns
from tests.vllm_talk import ANSWER, NEW, Talk, reusable, talking, tokens_in
from tests.vllm_world import Json, prompt_of, tokens_of

pytestmark = [pytest.mark.vllm, pytest.mark.nats, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def talk(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Talk]:
    async with talking(
        tmp_path_factory.mktemp("history"),
        prefill_arguments=[NO_CACHE],
        engine_arguments=["--trust-request-chat-template"],
    ) as found:
        yield found
        await found.forget_all()


async def test_ten_turns_where_only_decode_caches(talk: Talk) -> None:
    await ten_turns(talk, prefill_caches=False, decode_caches=True)


async def test_twenty_turns_that_follow_each_other_at_once_all_hit(talk: Talk) -> None:
    said = await talk.turns(21, prompt=200, seed=2)
    assert [word.split()[0] for word in said] == ["miss"] + ["hit"] * 20, said


def _says(tokens: int) -> str:
    return f"hit tokens={tokens}" if tokens else "miss reason=changed"


CHANGES: dict[str, Callable[[list[int]], list[int]]] = {
    "unchanged": lambda tokens: tokens,
    "edited": lambda tokens: [*tokens[:214], 7, *tokens[215:]],
    "edited in the first block": lambda tokens: [7, *tokens[1:]],
    "shortened at the front": lambda tokens: tokens[100:],
    "truncated at the end": lambda tokens: tokens[:500],
    "its answer altered": lambda tokens: [*tokens[:-5], 7, *tokens[-4:]],
    "a whole other prompt": lambda _: prompt_of(600, seed=3),
}


@pytest.mark.parametrize("name", CHANGES)
async def test_a_changed_prompt_is_reused_up_to_the_change(talk: Talk, name: str) -> None:
    prompt = prompt_of(700, seed=20)
    _, first = await talk.ask({"prompt": prompt}, f"prompt {name}")
    changed = CHANGES[name](prompt + tokens_in(first)[1])
    said, second = await talk.ask({"prompt": changed + prompt_of(NEW, seed=21)}, f"prompt {name}")
    assert said == _says(reusable(first, second))


SYSTEM = "You answer in one word, you never explain, and you know every river of Europe by heart. " * 2
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n"
    "{% if loop.first and tools %}tools: {{ tools | tojson }}\n{% endif %}{% endfor %}assistant: "
)
OTHER_TEMPLATE = "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }}\n{% endfor %}<assistant> "


def _tools(name: str) -> Json:
    function = {"name": name, "description": "Looks a river up.", "parameters": {"type": "object", "properties": {}}}
    return {"tools": [{"type": "function", "function": function}], "tool_choice": "none"}


def _chat(system: str = SYSTEM, thought: str = "<think>The Danube is too far east.</think>") -> list[Json]:
    return [
        {"role": "system", "content": system},
        {"role": "user", "content": "Which river flows through Cologne and through Basel?"},
        {"role": "assistant", "content": f"{thought}The Rhine."},
        {"role": "user", "content": "And through Vienna, Budapest and Belgrade?"},
    ]


def _answered(answer: Json) -> list[Json]:
    return [
        {"role": "assistant", "content": answer["choices"][0]["message"]["content"]},
        {"role": "user", "content": "And where does that one end?"},
    ]


Chats = tuple[Json, Callable[[Json], Json]]
CHATS: dict[str, Chats] = {
    "unchanged": ({"messages": _chat()}, lambda a: {"messages": _chat() + _answered(a)}),
    "its reasoning stripped": ({"messages": _chat()}, lambda a: {"messages": _chat(thought="") + _answered(a)}),
    "another system prompt": (
        {"messages": _chat()},
        lambda a: {"messages": _chat(system=SYSTEM.replace("by heart. ", "well. ")) + _answered(a)},
    ),
    "its oldest turn dropped": (
        {"messages": _chat()},
        lambda a: {"messages": [_chat()[0], *_chat()[3:], *_answered(a)]},
    ),
    "its answer altered": (
        {"messages": _chat()},
        lambda a: {"messages": [*_chat(), {"role": "assistant", "content": "The Danube."}, _answered(a)[1]]},
    ),
    "another chat template": (
        {"messages": _chat()},
        lambda a: {"messages": _chat() + _answered(a), "chat_template": OTHER_TEMPLATE},
    ),
    "other tools": (
        {"messages": _chat(), "chat_template": TEMPLATE} | _tools("find_river"),
        lambda a: {"messages": _chat() + _answered(a), "chat_template": TEMPLATE} | _tools("look_up"),
    ),
}


@pytest.mark.parametrize("name", CHATS)
async def test_a_changed_chat_is_reused_up_to_the_change(talk: Talk, name: str) -> None:
    body, then = CHATS[name]
    _, first = await talk.ask(body, f"chat {name}", "chat/completions")
    said, second = await talk.ask(then(first), f"chat {name}", "chat/completions")
    assert said == _says(reusable(first, second))
    assert reusable(first, second) > 0 or name == "another chat template"


async def test_a_chat_without_an_id_is_known_by_its_first_messages(talk: Talk) -> None:
    messages = _chat(system=SYSTEM + "Be kind.")
    body: Json = {"messages": messages, "max_tokens": ANSWER}
    first = await talk.there.same_as_plain(body, path="chat/completions")
    answer = await talk.there.same_as_plain({**body, "messages": messages + _answered(first)}, path="chat/completions")
    assert answer["headers"]["X-Kvbus-Reuse"].startswith("hit tokens=")


async def test_a_turn_that_decode_computes_itself_is_held_for_the_next_one_all_the_same(talk: Talk) -> None:
    said, answer = await talk.ask({"prompt": prompt_of(400, seed=70)}, "alone", mode="local")
    assert said == "miss reason=disabled"
    prompt, tokens = tokens_in(answer)
    said, then = await talk.ask({"prompt": prompt + tokens + prompt_of(NEW, seed=71)}, "alone")
    assert said == _says(reusable(answer, then)) == f"hit tokens={400 + ANSWER - 1}"


async def test_each_branch_of_a_forked_conversation_takes_what_is_held_of_it(talk: Talk) -> None:
    prompt = prompt_of(400, seed=30)
    _, root = await talk.ask({"prompt": prompt}, "fork")
    trunk, held = prompt + tokens_in(root)[1], root
    for seed in (31, 32, 31):
        said, branch = await talk.ask({"prompt": trunk + prompt_of(100, seed=seed)}, "fork")
        assert said == _says(reusable(held, branch))
        held = branch


async def test_the_same_turn_sent_again_takes_the_first_ones_kv(talk: Talk) -> None:
    body = {"prompt": prompt_of(400, seed=40)}
    _, first = await talk.ask(body, "again")
    for _ in range(2):
        said, _ = await talk.ask(body, "again")
        assert said == _says(reusable(first, first))


async def test_of_two_turns_at_once_one_takes_the_kv_and_both_are_right(talk: Talk) -> None:
    _, first = await talk.ask({"prompt": prompt_of(700, seed=50)}, "twice")
    prompt = prompt_of(700, seed=50) + tokens_in(first)[1] + prompt_of(NEW, seed=51)
    body: Json = {"prompt": prompt, "max_tokens": 400, "conversation_id": "twice"}
    expected = await talk.there.plain(body)  # takes longer than the offer
    answers = await asyncio.gather(*(talk.there.routed(body, {"X-Kvbus-Mode": "early"}) for _ in range(2)))
    assert [tokens_of(answer) for answer in answers] == [tokens_of(expected)] * 2
    said = sorted(answer["headers"]["X-Kvbus-Reuse"] for answer in answers)
    assert said == [_says(reusable(first, expected)), "miss reason=claimed"]


async def test_a_turn_that_is_sent_again_after_its_client_left_is_computed(talk: Talk) -> None:
    """The first attempt had claimed the conversation, and its decode never got to the end of it."""
    _, first = await talk.ask({"prompt": prompt_of(400, seed=60)}, "left")
    prompt = prompt_of(400, seed=60) + tokens_in(first)[1] + prompt_of(NEW, seed=61)
    body: dict[str, Any] = {"model": talk.there.model, "prompt": prompt, "conversation_id": "left", "stream": True}
    body |= {"max_tokens": 2000, "ignore_eos": True, "temperature": 0}
    async with talk.there.http.post(talk.there.fleet.base_url + "/v1/completions", json=body) as response:
        assert response.headers["X-Kvbus-Reuse"].startswith("hit tokens=")
        await response.content.readany()
    said, answer = await talk.ask({"prompt": prompt}, "left")
    assert said == "miss reason=claimed"
    said, _ = await talk.ask({"prompt": prompt + tokens_of(answer)[0] + prompt_of(NEW, seed=62)}, "left")
    assert said.startswith("hit tokens=")

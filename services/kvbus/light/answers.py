"""What a client gets: OpenAI's answers in vLLM's form, whole and streamed. Pure."""

import time
from typing import Any

import msgspec

from kvbus.light.asked import Asked
from kvbus.light.language import EOS, text_of
from kvbus.light.request import Delta

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


class Answering:
    """One HTTP request's answer, while it grows. Choice `index` belongs to prompt `index // n`."""

    def __init__(self, asked: Asked, request_id: str, model: str) -> None:
        self.asked, self.model = asked, model
        self.id = f"{'chatcmpl' if asked.chat else 'cmpl'}-{request_id}"
        self.created = int(time.time())
        count = len(asked.prompts) * asked.n
        self.tokens: list[list[int]] = [[] for _ in range(count)]
        self.reasons = [""] * count
        self.cached_tokens = 0
        self.params: dict[str, Any] | None = None

    @property
    def ended(self) -> bool:
        return all(self.reasons)

    @property
    def aborted(self) -> bool:
        """Whether the engine itself has given up."""
        return "abort" in self.reasons

    def take(self, index: int, delta: Delta) -> None:
        """One choice has grown or ended."""
        if delta.token is not None:
            self.tokens[index].append(delta.token)
        self.reasons[index] = delta.finish_reason
        self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)
        self.params = self.params or delta.params

    def prompt_of(self, index: int) -> list[int]:
        return self.asked.prompts[index // self.asked.n]

    def whole(self) -> bytes:
        """The answer to a request that does not stream."""
        kind = "chat.completion" if self.asked.chat else "text_completion"
        choices = [self._choice(index) for index in range(len(self.tokens))]
        answer = self._head(kind) | {"choices": choices, "usage": self.usage(), "kv_transfer_params": self.params}
        if self.asked.chat and self.asked.body.return_token_ids:
            answer["prompt_token_ids"] = self.asked.prompts[0]
        return _encode(answer)

    def opening(self) -> list[bytes]:
        """The events before any token: a chat names its speaker, and both the prompt's tokens when asked to."""
        events = []
        for index in range(len(self.tokens)) if self.asked.chat else ():
            chunk: dict[str, Any] = {"delta": {"role": "assistant", "content": ""}}
            events.append(self._event(index, chunk, "", first=True))
        return events

    def event(self, index: int, delta: Delta) -> bytes:
        """The event of what `take` has just been given."""
        tokens = [] if delta.token is None else [delta.token]
        text = text_of(tokens)
        chunk: dict[str, Any] = {"delta": {"content": text}} if self.asked.chat else {"text": text}
        first = not self.asked.chat and len(self.tokens[index]) == 1
        if first and self.asked.body.echo:
            chunk["text"] = text_of(self.prompt_of(index)) + text
        if self.asked.body.return_token_ids:
            chunk["token_ids"] = tokens
        return self._event(index, chunk, delta.finish_reason, first=first)

    def closing(self) -> bytes:
        """The events after the last token."""
        options = self.asked.body.stream_options
        if options is None or not options.include_usage:
            return DONE
        return self._data(self._head(self._chunk_kind()) | {"choices": [], "usage": self.usage()}) + DONE

    def usage(self) -> dict[str, Any]:
        """Tokens in and out."""
        prompt = sum(map(len, self.asked.prompts))
        completion = sum(map(len, self.tokens))
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion,
            "completion_tokens": completion,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def _choice(self, index: int) -> dict[str, Any]:
        tokens = self.tokens[index]
        choice: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": self.reasons[index]}
        choice["stop_reason"] = None
        if self.asked.chat:
            choice["message"] = {"role": "assistant", "content": text_of(tokens)}
        else:
            choice["text"] = (text_of(self.prompt_of(index)) if self.asked.body.echo else "") + text_of(tokens)
        if self.asked.body.return_token_ids:
            choice["token_ids"] = tokens
            if not self.asked.chat:
                choice["prompt_token_ids"] = self.prompt_of(index)
        return choice

    def _event(self, index: int, chunk: dict[str, Any], reason: str, *, first: bool) -> bytes:
        choice = {"index": index, "logprobs": None, "finish_reason": reason or None, **chunk}
        event = self._head(self._chunk_kind()) | {"choices": [choice]}
        if first and self.asked.body.return_token_ids:
            (event if self.asked.chat else choice)["prompt_token_ids"] = self.prompt_of(index)
        return self._data(event)

    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.asked.chat else "text_completion"

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _data(self, event: dict[str, Any]) -> bytes:
        return b"data: %b\n\n" % _encode(event)


def error_body(text: str, kind: str, status: int) -> bytes:
    """An error as vLLM and the ticket guard tell it."""
    return _encode({"error": {"message": text, "type": kind, "param": None, "code": status}})


def models_body(model: str, max_model_len: int, created: int) -> bytes:
    """The answer of /v1/models."""
    card = {"id": model, "object": "model", "created": created, "owned_by": "kvbus", "root": model, "parent": None}
    return _encode({"object": "list", "data": [card | {"max_model_len": max_model_len, "eos_token_id": EOS}]})

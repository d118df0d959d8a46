"""What a client asks for: OpenAI's bodies, with vLLM's extensions, as far as a light engine honours them. Pure.

Honoured: prompt or messages, max_tokens, n, stream, stream_options.include_usage, min_tokens, ignore_eos, echo,
return_token_ids, cache_salt, kv_transfer_params. The next token is always the most likely one, as at temperature 0;
what else is asked for (sampling, stop strings, log probabilities, tools) is ignored.
"""

from typing import Any

import msgspec

from kvbus.light.language import TOKEN_MAX, chat_prompt, tokens_of
from kvbus.light.settings import LightSettings
from kvbus_schemas import Ticket, TicketError, ticket_from_params

N_MAX = 128
COMPLETION_TOKENS = 16
"""OpenAI's default for completions; a chat goes on until it ends or the context is full."""


class BadRequestError(ValueError):
    """The client's fault. `kind` and `status` are what it is told beside the text."""

    def __init__(self, text: str, *, kind: str = "BadRequestError", status: int = 400) -> None:
        super().__init__(text)
        self.kind, self.status = kind, status


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = False


class Body(msgspec.Struct, frozen=True):
    """The fields that are honoured."""

    model: str | None = None
    prompt: Any = None
    messages: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    echo: bool = False
    return_token_ids: bool | None = None
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None


class Asked(msgspec.Struct, frozen=True):
    """A request that can be served."""

    body: Body
    chat: bool
    prompts: list[list[int]]
    max_tokens: list[int]
    """Of each prompt's answer."""
    n: int


_body = msgspec.json.Decoder(Body)


def read(data: bytes, settings: LightSettings, model: str, *, chat: bool) -> Asked:
    """Read a body. Raises BadRequestError."""
    try:
        body = _body.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequestError(f"the body does not fit: {error}") from error
    if body.model not in (None, "", model):
        text = f"The model `{body.model}` does not exist."
        raise BadRequestError(text, kind="NotFoundError", status=404)
    n = 1 if body.n is None else body.n
    if not 1 <= n <= N_MAX:
        raise BadRequestError(f"n is {n}: it must be from 1 to {N_MAX}")
    prompts = [_chat_tokens(body)] if chat else prompts_of(body.prompt)
    wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if wanted is None and not chat:
        wanted = COMPLETION_TOKENS
    return Asked(body, chat, prompts, [_room(prompt, wanted, settings) for prompt in prompts], n)


def check_ticket(params: dict[str, Any] | None, engine_id: str, incarnation: str) -> Ticket | None:
    """The request's ticket, by the rules of `engine/ticket_guard.py`. Raises BadRequestError on a bad one."""
    try:
        ticket = ticket_from_params(params)
        if ticket is not None:
            ticket.check(engine_id, incarnation)
    except TicketError as error:
        raise BadRequestError(str(error), kind="invalid_ticket") from error
    return ticket


def prompts_of(prompt: Any) -> list[list[int]]:
    """The token ids of each prompt: a text, token ids, or a list of either. Raises BadRequestError."""
    if isinstance(prompt, str):
        prompts = [tokens_of(prompt)]
    elif not isinstance(prompt, list) or not prompt:
        raise BadRequestError("prompt must be a text, a list of token ids, or a list of either, and not empty")
    elif all(isinstance(item, int) for item in prompt):
        prompts = [_checked(prompt)]
    else:
        prompts = [tokens_of(item) if isinstance(item, str) else _checked(item) for item in prompt]
    if not all(prompts):
        raise BadRequestError("a prompt is empty: send at least one token")
    return prompts


def _checked(tokens: Any) -> list[int]:
    if isinstance(tokens, list) and all(type(token) is int and 0 <= token <= TOKEN_MAX for token in tokens):
        return tokens
    raise BadRequestError(f"token ids must be whole numbers from 0 to {TOKEN_MAX}")


def _chat_tokens(body: Body) -> list[int]:
    if not body.messages:
        raise BadRequestError("messages must not be empty")
    return tokens_of(chat_prompt(body.messages, add_generation_prompt=body.add_generation_prompt))


def _room(prompt: list[int], wanted: int | None, settings: LightSettings) -> int:
    """How many tokens the answer may have. Raises BadRequestError when there is room for none, or too little."""
    if wanted is not None and wanted < 1:
        raise BadRequestError(f"max_tokens must be at least 1, got {wanted}")
    limit = min(settings.max_model_len, settings.blocks * settings.block_size)
    room = limit - len(prompt)
    if room < (wanted or 1):
        raise BadRequestError(
            f"This model's maximum context length is {limit} tokens. However, you requested {wanted or 1} output "
            f"tokens and your prompt contains {len(prompt)} input tokens."
        )
    return wanted or room

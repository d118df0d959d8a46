"""`kvbus sim-engine prefill|decode MODEL`: an engine's part on the bus, without vLLM."""

import functools
from typing import Annotated

import typer

from kvbus import process
from kvbus.errors import ConfigError


def register(app: typer.Typer) -> None:
    """Add `kvbus sim-engine`."""
    app.command("sim-engine")(sim_engine)


def sim_engine(
    role: Annotated[str, typer.Argument(help="prefill or decode")],
    model: Annotated[str, typer.Argument(help="the name under which it is served")] = "light",
    nats: Annotated[str | None, typer.Option(help="NATS URL; empty: no bus [nats://127.0.0.1:4222]")] = None,
    engine_id: Annotated[str | None, typer.Option(help="stable name, unique on the bus [ROLE-<port>]")] = None,
    host: Annotated[str | None, typer.Option(help="address to listen on [127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option(help="port to listen on; 0 takes a free one [8000]")] = None,
    advertise: Annotated[str | None, typer.Option(help="URL for routers, when it is not http://HOST:PORT")] = None,
    drain_s: Annotated[float | None, typer.Option(help="seconds to finish running requests after SIGTERM [30]")] = None,
    token_us: Annotated[float | None, typer.Option(help="microseconds of a step in which answers grow [2000]")] = None,
    prefill_tokens_per_s: Annotated[
        float | None, typer.Option(help="how fast prompts are computed; 0: at once [50000]")
    ] = None,
    blocks: Annotated[int | None, typer.Option(help="KV blocks [512]")] = None,
    block_size: Annotated[int | None, typer.Option(help="tokens in a block [32]")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="requests in a batch [64]")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="tokens of a step [512]")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="tokens of prompt and answer [8192]")] = None,
    eos_every: Annotated[
        int | None, typer.Option(help="mean length of an answer; 0: never ends by itself [64]")
    ] = None,
    kv_bytes_per_token: Annotated[int | None, typer.Option(help="what a token's KV is said to weigh [1024]")] = None,
    link_mb_per_s: Annotated[float | None, typer.Option(help="how fast KV moves; 0: as TCP does [0]")] = None,
) -> None:
    """Run a light engine: real coordination over a simulated model, whose every token depends on all before it.

    Each option can also be given as KVBUS_SIM_ENGINE_<NAME>; how it takes part on the bus as KVBUS_ENGINE_<NAME>.
    """
    given = {name: value for name, value in locals().items() if name not in ("role", "model")}
    if role not in ("prefill", "decode"):
        raise ConfigError(f"role must be prefill or decode, not {role!r}")
    try:
        from kvbus.light.serve import serve
    except ImportError as error:
        raise ConfigError(f"light engines need {error.name}: pip install 'kvbus[router]'") from error
    from kvbus.light.settings import light_settings

    process.configure_logging()
    settings = light_settings(given)
    process.run(functools.partial(serve, settings, "prefill" if role == "prefill" else "decode", model))

"""Light engines: an engine's part on the bus without vLLM and without NIXL, for laptops, replays and tests.

The coordination is production's own: `SchedulerSide`, `RankSide` and `Link`. Simulated are the model (`language`), its
KV memory (`memory`), vLLM's scheduler and loop (`scheduler`, `loop`), the data plane (`plane`: TCP instead of NIXL) and
the HTTP server (`api`). What a block holds is the tokens that its KV stands for, and the next token is computed from
the blocks alone, so that any mix-up of KV shows in the answer.
"""

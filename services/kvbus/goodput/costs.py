"""What things cost in the simulation: every number, and where it is from. Pure.

Prefill and transfer are those that AWS published in October 2026 for Qwen3-32B on eight H200, vLLM 0.29: prefill took
153 ms for 2k tokens and 744 ms for 24k, the transfer of the KV 30 and 130 ms. Decode is reckoned from the model's size
and the memory's bandwidth, as its times were not published. Ratios between policies are what this is good for, not
milliseconds.
"""

import msgspec


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """One engine's speed and size."""

    prefill_base_s: float = 0.100
    """Of each prompt, whatever its length: the line through both published points."""
    prefill_tokens_per_s: float = 37_000.0
    """The slope of that line."""
    transfer_base_s: float = 0.021
    transfer_s_per_token: float = 4.5e-6
    """The line through the two published transfers."""
    step_base_s: float = 0.010
    """A decode step: weights of 32 GB at 60 % of 38 TB/s, and the launch of 64 layers. Reckoned, not measured."""
    step_s_per_request: float = 20e-6
    """Sampling and scheduling of one more request. An assumption."""
    step_s_per_token: float = 11.4e-9
    """Reading the KV of one token, 262 KB, at that bandwidth."""
    cache_tokens: int = 1_000_000
    """KV of one prefill engine. Eight H200 would hold 3.6 million tokens; less, so that caches fill within a run."""
    decode_tokens: int = 3_600_000
    """KV of one decode engine."""
    running_max: int = 256
    """Requests in a decode's batch (vLLM's default)."""
    queue_max: int = 64
    """Requests that wait at one prefill; beyond it they are refused."""
    ttft_max_s: float = 5.0
    tpot_max_s: float = 0.050
    """The service's promise: a request that misses either does not count. Our choice."""
    report_every_s: float = 0.5
    """Load reports, as in production."""
    bus_s: float = 0.006
    """From an event in an engine to a router: 5 ms of gathering, 1 ms of bus."""

    def prefill_s(self, tokens: int) -> float:
        """Computing a prompt of which so many tokens are not there."""
        return self.prefill_base_s + tokens / self.prefill_tokens_per_s

    def transfer_s(self, tokens: int) -> float:
        """Handing so many tokens over."""
        return self.transfer_base_s + tokens * self.transfer_s_per_token

    def step_s(self, running: int, tokens: int) -> float:
        """One step of a decode with so many requests and tokens."""
        return self.step_base_s + running * self.step_s_per_request + tokens * self.step_s_per_token

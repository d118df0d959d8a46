"""Every metric of every process, once: what is served, documented (`kvbus schema metrics`) and shown is what is here.

Names are `kvbus_<process>_<what>_<unit>`; what the bus connection of any process counts is `kvbus_bus_...`, told apart
by the scrape's own labels. A counter is exposed with `_total` behind its name.
"""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""For what a client waits."""
FINE_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)
"""For what happens between two processes."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `name` is without the suffix `_total`."""

    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def exposed(self) -> str:
        """The name on the page; a histogram's has `_bucket`, `_sum` or `_count` behind it."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


def _counter(name: str, text: str, *labels: str) -> Metric:
    return Metric(name, "counter", text, labels)


def _gauge(name: str, text: str, *labels: str) -> Metric:
    return Metric(name, "gauge", text, labels)


def _histogram(name: str, text: str, *labels: str, buckets: tuple[float, ...] = FINE_SECONDS) -> Metric:
    return Metric(name, "histogram", text, labels, buckets)


BUS = (
    _counter("kvbus_bus_published", "Messages that this process has sent."),
    _counter("kvbus_bus_received", "Messages that have reached its handlers."),
    _counter("kvbus_bus_dead_letters", "Bytes that came in and were no message, or spoke in another's name."),
    _counter("kvbus_bus_gaps", "Messages that a sender has counted and this process never saw; only who hears all."),
    _counter("kvbus_bus_handler_errors", "Messages whose handler has raised."),
    _counter("kvbus_bus_reconnects", "Times that the connection to NATS has come back."),
    _counter("kvbus_bus_dropped", "Messages that were dropped because a handler was too slow."),
    _counter("kvbus_bus_denied", "What NATS has refused for want of permission."),
    _gauge("kvbus_bus_connected", "1 while NATS is reachable."),
)
"""Of every process but the console, which counts under its own name. An engine's are its scheduler's and its ranks'."""

ROUTER = (
    _counter("kvbus_router_requests", "Requests answered.", "mode", "status"),
    _histogram("kvbus_router_ttft_seconds", "Arrival to first body byte.", "mode", buckets=SECONDS),
    _histogram("kvbus_router_duration_seconds", "Arrival to the end.", "mode", buckets=SECONDS),
    _counter("kvbus_router_retries", "Dispatches after the first."),
    _counter("kvbus_router_cancels", "CancelOrdered published.", "reason"),
    _counter("kvbus_router_reuse", "Requests by what was reused of their conversation.", "result", "reason"),
    _counter("kvbus_router_reuse_tokens", "Tokens that prefill took over."),
    _gauge("kvbus_router_held_blocks", "Blocks that an engine keeps for conversations, by its last report.", "engine"),
    _gauge("kvbus_router_requests_in_flight", "Requests being served."),
    _gauge("kvbus_router_requests_waiting", "Requests waiting for their turn."),
    _gauge("kvbus_router_connections", "Client connections."),
    _gauge("kvbus_router_engines", "Engines alive.", "role"),
    _counter("kvbus_router_unsent", "Messages that the bus did not take."),
    _gauge("kvbus_router_cache_blocks", "Blocks of an engine's prefix cache that are known.", "engine"),
    _gauge("kvbus_router_cache_exact", "1 while all of them are known, 0 while degraded.", "engine"),
    _counter("kvbus_router_cache_gaps", "Times that something of an engine's cache was missed.", "engine"),
    _counter("kvbus_router_cache_recoveries", "Times that an engine's whole cache was heard again.", "engine"),
    _gauge("kvbus_router_cache_marks", "Beginnings of prompts that are known."),
    _counter("kvbus_router_decisions", "Dispatches, by who decided, and by the canary's share.", "arm", "by"),
    _counter(
        "kvbus_router_guest_answers", "Answers of guests that decide, by what became of them.", "guest", "outcome"
    ),
    _histogram("kvbus_router_guest_seconds", "Question to answer, of answers that were used.", "guest"),
    _gauge("kvbus_router_guest_resting", "1 while a guest is not asked, after failures in a row.", "guest"),
    _counter("kvbus_router_shadow_answers", "Answers of shadows, by agreement with the choice.", "guest", "outcome"),
    _gauge("kvbus_router_canary_share", "Share of requests that goes to the canary, 0 to 1."),
)

MATCHER = (
    _counter("kvbus_matcher_events", "What the matcher has heard and done.", "event"),
    _counter("kvbus_matcher_refused", "Registrations that were refused.", "reason"),
    _gauge("kvbus_matcher_open_transfers", "Transfers that are not over."),
    _gauge("kvbus_matcher_tombstones", "Transfers that are remembered as over."),
    _gauge("kvbus_matcher_engines", "Engines that live."),
    _gauge("kvbus_matcher_active", "1 on the matcher that publishes, 0 on a standby."),
)

REUSE = (
    _counter("kvbus_reuse_offers", "Offers of decode engines, by what became of them.", "event"),
    _counter("kvbus_reuse_withdrawals", "Withdrawals, by what became of them.", "event"),
    _counter("kvbus_reuse_released", "Offers whose holders were told to let go.", "event"),
    _counter("kvbus_reuse_asks", "Questions."),
    _counter("kvbus_reuse_grants", "Offers that were claimed."),
    _counter("kvbus_reuse_looks", "Offers that were only looked at."),
    _counter("kvbus_reuse_misses", "Questions without a grant.", "reason"),
    _counter("kvbus_reuse_claims_lost", "Rounds in which somebody else was faster."),
    _gauge("kvbus_reuse_keys", "Keys in the bucket of conversations."),
    _gauge("kvbus_reuse_engines", "Engines that live."),
)

ENGINE = (
    _gauge("kvbus_engine_info", "1, with who this engine is.", "engine_id", "role", "incarnation"),
    _counter("kvbus_engine_registrations", "BlocksRegistered sent, repeats included.", "kind"),
    _counter("kvbus_engine_transfers", "Transfers that ended at this engine, their consumer.", "kind", "outcome"),
    _histogram("kvbus_engine_transfer_wait_seconds", "Registration to the transfer's end.", "kind"),
    _histogram("kvbus_engine_start_seconds", "Last completion notice to the request being ready to run.", "kind"),
    _gauge("kvbus_engine_waiting_transfers", "Transfers that this engine waits for now."),
    _histogram("kvbus_engine_prefill_seconds", "First blocks allocated to the last forward pass, by prefill."),
    _counter("kvbus_engine_prefill_tokens", "Prompt tokens of finished prefills.", "source"),
    _gauge("kvbus_engine_producing_transfers", "Transfers that this prefill computes, or holds blocks for."),
    _histogram("kvbus_engine_handoff_seconds", "Last forward pass to the last WRITE done, by producer rank.", "kind"),
    _histogram("kvbus_engine_write_seconds", "First WRITE submitted to the last one done, by producer rank.", "kind"),
    _counter("kvbus_engine_written_bytes", "Bytes written into other engines.", "kind"),
    _counter("kvbus_engine_tail_bytes", "Of them, bytes that were unwritten when the last pass had ended.", "kind"),
    _counter("kvbus_engine_writes", "NIXL WRITEs.", "kind"),
    _counter("kvbus_engine_write_failures", "Transfers that a producer rank could not write.", "reason"),
    _counter("kvbus_engine_unavailable", "BlocksUnavailable sent.", "reason"),
    _counter("kvbus_engine_cancels", "CancelOrdered sent, repeats included."),
    _counter("kvbus_engine_offers", "Finished turns whose blocks this decode has kept."),
    _counter("kvbus_engine_offered_tokens", "Tokens of those turns."),
    _counter("kvbus_engine_withdrawals", "Kept turns that were let go without being taken.", "reason"),
    _counter("kvbus_engine_reuse_claims", "Grants that came to this prefill, by what became of them.", "result"),
    _counter("kvbus_engine_reuse_taken_tokens", "Tokens that this prefill has taken back."),
    _counter("kvbus_engine_reuse_given_blocks", "Blocks that this decode has given back, counted at rank 0."),
    _gauge("kvbus_engine_held_blocks", "Blocks kept for conversations."),
    _gauge("kvbus_engine_held_conversations", "Conversations kept."),
    _gauge("kvbus_engine_posts_waiting", "Messages that wait for the bus."),
    _counter("kvbus_engine_posts_dropped", "Messages that found that queue full."),
    _gauge("kvbus_engine_presence_age_seconds", "Since the engine's own card was seen on the bus."),
)
"""On vLLM's own /metrics page (light engines: theirs), each with vLLM's labels `model_name` and `engine` too."""

STAGES = ("wait", "reuse_ask", "route", "prefill_queue", "reuse_take", "prefill", "handoff", "start")

OBSERVER = (
    _counter("kvbus_observer_messages", "Messages on the bus.", "plane", "kind"),
    _counter("kvbus_observer_missing_messages", "Messages that senders counted and nobody saw.", "process"),
    _counter("kvbus_observer_dead_letters", "Dead letters that any process has reported.", "process"),
    _counter("kvbus_observer_requests", "Dispatches that have ended.", "mode", "outcome"),
    _counter("kvbus_observer_transfers", "Transfers that have ended.", "outcome"),
    _counter("kvbus_observer_reuse_answers", "Answers to routers that asked for a conversation's KV.", "result"),
    _histogram("kvbus_observer_ttft_seconds", "Arrival to first byte of the requests that were split."),
    _histogram("kvbus_observer_stage_seconds", "A stage of the time to first token; they add up to it.", "stage"),
    _gauge("kvbus_observer_stories", "Requests under way."),
    _gauge("kvbus_observer_engines", "Engines alive.", "role"),
    _gauge("kvbus_observer_queue_messages", "Messages that wait for this process."),
    _gauge("kvbus_observer_capture_lag_seconds", "A message published to its being readable in the trace."),
    _gauge("kvbus_observer_trace_messages", "Messages that the trace holds."),
    _gauge("kvbus_observer_trace_bytes", "Bytes that the trace holds."),
    _gauge("kvbus_observer_trace_age_seconds", "Age of the oldest message in the trace."),
)

CONSOLE = (
    _counter("kvbus_console_messages", "Messages heard."),
    _counter("kvbus_console_undecodable", "Messages that were none of the bus's."),
    _counter("kvbus_console_gaps", "Messages that a sender counted and the console never heard."),
    _counter("kvbus_console_dropped", "Messages that came faster than they could be taken."),
    _counter("kvbus_console_dead_letters", "Dead letters that others reported."),
    _counter("kvbus_console_reconnects", "Times that NATS came back."),
    _gauge("kvbus_console_bus_connected", "1 while NATS is reachable."),
    _gauge("kvbus_console_bus_round_trip_seconds", "To NATS and back."),
    _gauge("kvbus_console_browsers", "Pages that are open."),
    _gauge("kvbus_console_requests", "Requests that are kept to look at."),
)

SECTIONS: tuple[tuple[str, tuple[Metric, ...]], ...] = (
    ("Every process but the console", BUS),
    ("`kvbus router`", ROUTER),
    ("`kvbus matcher`", MATCHER),
    ("`kvbus reuse`", REUSE),
    ("Engines", ENGINE),
    ("`kvbus observer`", OBSERVER),
    ("`kvbus console`", CONSOLE),
)
BY_NAME = {metric.name: metric for _, metrics in SECTIONS for metric in metrics}


def markdown() -> str:
    """One table for each process, as it stands in the README."""
    return "\n".join(_table(title, metrics) for title, metrics in SECTIONS)


def _table(title: str, metrics: tuple[Metric, ...]) -> str:
    rows = [
        f"| `{metric.exposed}` | {metric.kind} | {', '.join(f'`{label}`' for label in metric.labels)} | {metric.text} |"
        for metric in metrics
    ]
    return f"**{title}**\n\n| metric | kind | labels | meaning |\n| --- | --- | --- | --- |\n" + "\n".join(rows) + "\n"

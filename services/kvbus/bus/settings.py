"""What a process must know to reach the bus, and what it counts while it is on it."""

from dataclasses import dataclass

import msgspec


class BusSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to reach NATS, and the limits of one connection. Other settings Structs inherit from this one."""

    nats: str = "nats://127.0.0.1:4222"
    """One URL, or several of one cluster with commas between them; may carry `user:password@`."""
    nkey_seed_file: str = ""
    creds_file: str = ""
    tls_ca: str = ""
    """File with the certificate authority of the server; set it to use TLS."""
    tls_cert: str = ""
    tls_key: str = ""
    connect_timeout_s: float = 5.0
    reconnect_wait_s: float = 0.1
    """Equal in all processes: core messages between an early and a late returner would be lost."""
    ping_interval_s: int = 5
    """Two of these without an answer end a connection."""
    pending_size_bytes: int = 256 * 1024
    """What is kept for sending while NATS is away; beyond it `publish` raises."""
    subscription_pending_max: int = 65_536
    """Messages that may wait for one subscription's handler; the newest beyond it are dropped and counted."""
    trace_max_age_s: int = 86_400
    trace_max_bytes: int = 1024**3
    """Limits of the trace, applied when its stream is made. Others than the default are applied to one that is there
    already too, by whoever connects last."""
    trace_replicas: int = 1


@dataclass(slots=True)
class BusCounters:
    """Counts since the start of the process."""

    published: int = 0
    received: int = 0
    dead_letters: int = 0
    handler_errors: int = 0
    gaps: int = 0
    """Messages that a sender counted and this process never saw (subscriptions to everything only)."""
    reconnects: int = 0
    slow_consumer_drops: int = 0
    permission_errors: int = 0

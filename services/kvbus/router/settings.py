"""What a router can be told. Every limit has a name and a unit."""

from kvbus.bus.settings import BusSettings


class RouterSettings(BusSettings, frozen=True, forbid_unknown_fields=True):
    """Settings of `kvbus router`: flags, then KVBUS_ROUTER_<NAME>, then the file's table [router]."""

    host: str = "127.0.0.1"
    port: int = 8000
    workers: int = 1
    """Processes that share the port."""
    policy: str = "weighed"
    """An entry point of the group `kvbus.policies`, or `module:Class`."""
    guest: str = ""
    """A router on the bus that decides instead of the policy, by its name; the policy is its fallback."""
    guest_deadline_ms: float = 50.0
    """A request waits so long, in milliseconds, for the guest's answer."""
    shadow: tuple[str, ...] | str = ()
    """Routers on the bus whose answers are only compared, by name; `all` asks whoever listens. In one string, with
    blanks between."""
    static: tuple[str, ...] | str = ()
    """Stock vLLM engines with the pull connector, each `prefill=URL,decode=URL`; in one string, with blanks between."""
    attempts_max: int = 3
    """Dispatches of one request, the first included."""
    deadline_s: float = 600.0
    """A request must be finished after so long."""
    transfer_deadline_s: float = 120.0
    """A transfer must have ended after so long; then decode computes the prompt itself."""
    connect_timeout_s: float = 5.0
    """For NATS; engines have `engine_connect_timeout_s`."""
    engine_connect_timeout_s: float = 2.0
    prefill_linger_s: float = 5.0
    """A prefill leg may outlive its decode leg by so long before it is broken off."""
    prefill_answer_bytes_max: int = 1024 * 1024
    requests_in_flight_max: int = 1024
    requests_waiting_max: int = 1024
    """Beyond it a request is refused with 429."""
    wait_max_s: float = 10.0
    """A request that waited so long for its turn is refused with 503."""
    retry_after_s: int = 2
    header_bytes_max: int = 32 * 1024
    body_bytes_max: int = 8 * 1024 * 1024
    connections_max: int = 4096
    idle_timeout_s: float = 75.0
    read_timeout_s: float = 30.0
    reuse: bool = True
    """Give prefill what decode still holds of a conversation."""
    reuse_by_messages: bool = True
    """Recognise a chat without an id by its leading messages."""
    reuse_ask_ms: float = 50.0
    """A request waits so long, in milliseconds, for the answer to who holds its conversation."""
    reuse_report_ms: float = 200.0
    """The head of an answer waits so long after decode's first byte for prefill's word on what it took over."""
    reuse_secret: str = ""
    """Secret of conversation keys, the same for all routers; empty: one that they share over JetStream."""
    cache: bool = True
    """Follow the engines' prefix caches, so that policies know what each holds of a prompt."""
    cache_blocks_max: int = 500_000
    """Cached blocks that are known, of all engines together; 200 bytes each."""
    cache_marks_max: int = 200_000
    """Beginnings of prompts that are known; a prompt of 10,000 tokens has 50."""
    api_keys_file: str = ""
    """Keys that clients must send (`kvbus auth key add`), each with its tenant; empty: open to all."""
    tenant_header: str = ""
    """A header that names the tenant, set by a gateway that clients cannot get around; else the API key stands for
    the tenant."""
    drain_s: float = 30.0
    """After SIGTERM, running answers have so long to finish."""

    @property
    def static_pairs(self) -> tuple[str, ...]:
        """`static`, whichever way it was given."""
        return _parts(self.static)

    @property
    def shadows(self) -> tuple[str, ...]:
        """`shadow`, whichever way it was given."""
        return _parts(self.shadow)


def _parts(given: tuple[str, ...] | str) -> tuple[str, ...]:
    return tuple(given.split()) if isinstance(given, str) else given

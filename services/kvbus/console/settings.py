"""Settings of `kvbus console`."""

from kvbus.bus import BusSettings


class ConsoleSettings(BusSettings, frozen=True, forbid_unknown_fields=True):
    """The page, and how much it remembers."""

    host: str = "127.0.0.1"
    """Address to listen on. There is no login: whoever reaches it sees ids, block numbers and loads, never prompts."""
    port: int = 8080
    history_s: float = 600.0
    """How far back the stream is read at the start."""
    requests_max: int = 2000
    """Requests that are kept to look at, the newest; as many again of those that failed or still run."""
    browsers_max: int = 64
    """Pages that may be open at the same time; one more is refused with 503."""
    allowed_hosts: str = ""
    """Names, with commas between, under which browsers may ask for a console on a loopback address besides localhost
    (for a proxy in front). On other addresses every name is taken."""

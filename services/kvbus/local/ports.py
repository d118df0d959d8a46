"""Free ports on the loopback interface."""

import random
import socket
from pathlib import Path

LOWEST = 10_240
EPHEMERAL_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
TRIES = 200

_given: set[int] = set()


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that was free a moment ago, never the same one twice: vLLM shares ports silently.

    It lies below the range that the system takes the ports of outgoing connections from. Whoever binds it may be half a
    minute of loading away from that, or be restarted on it; a port of that range is somebody's connection by then.
    """
    below = _ephemeral_from()
    for _ in range(TRIES):
        port = random.randrange(LOWEST, below)  # noqa: S311  (not secret)
        if port not in _given and _is_free(host, port):
            _given.add(port)
            return port
    raise OSError(f"no port from {LOWEST} to {below - 1} is free on {host}")


def _ephemeral_from() -> int:
    """The first port of outgoing connections; Linux's default where nobody says."""
    try:
        return max(int(EPHEMERAL_FILE.read_text().split()[0]), LOWEST + 1000)
    except (OSError, ValueError):
        return 32_768


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True

"""Free ports on the loopback interface."""

import socket


def free_port() -> int:
    """A TCP port that was free a moment ago. vLLM shares ports silently, so never give the same one twice."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port

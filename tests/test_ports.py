"""Ports of what is started here: nobody else's by the time that they are bound."""

from kvbus.local.ports import EPHEMERAL_FILE, free_port


def test_a_port_lies_below_those_of_outgoing_connections_and_is_given_once() -> None:
    """A port of that range was somebody's connection after the 20 s in which vLLM loads."""
    below = int(EPHEMERAL_FILE.read_text().split()[0]) if EPHEMERAL_FILE.exists() else 32_768
    ports = [free_port() for _ in range(200)]
    assert len(set(ports)) == 200
    assert max(ports) < below

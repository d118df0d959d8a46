"""The contract of a router on the bus, as questions and what must hold of the answers."""

"""The world in one process, by seed."""

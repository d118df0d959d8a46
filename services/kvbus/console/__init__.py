"""`kvbus console`: one read-only page that shows the bus as it is. Everything here listens, nothing speaks."""

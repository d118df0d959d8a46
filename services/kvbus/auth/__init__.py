"""Access: who may say and hear what on the bus, the keys that prove who it is, and the API keys of clients."""

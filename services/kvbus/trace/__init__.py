"""Reading the trace: what happened to a request, message by message."""

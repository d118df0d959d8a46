"""The router: an OpenAI-compatible HTTP server that sends each request to a prefill and a decode engine."""

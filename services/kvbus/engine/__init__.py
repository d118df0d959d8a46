"""What runs inside a vLLM engine."""

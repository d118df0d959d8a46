"""kvbus: the coordination plane for disaggregated vLLM serving."""

__version__ = "0.1.0"

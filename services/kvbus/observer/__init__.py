"""The observer: reads the trace as it grows and counts what no single process can see."""

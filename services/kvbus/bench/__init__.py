"""Measurements: ratios of things run in turn, with their spread."""

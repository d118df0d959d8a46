"""Goodput by simulation: a public workload through production's policies, on engines of stated cost.

Simulated are engines, time and the bus's delay; the policies, the fleet with its load reports, the prefix index with
its gaps and restatements, and the engines' mirrors of their caches are production's own.
"""

"""Deterministic simulation: the production cores in one process, virtual time, and a world that does its worst.

`world` has the events and the clocks, `weather` what goes wrong, `bus`, `presence`, `plane` and `memory` what the
engines stand on, `loop` a model of vLLM's scheduler, `engine`, `rank`, `matcher` and `router` the processes, `run`
what `kvbus sim` calls. `stock*` is a model of the stock push protocol in the same world.
"""

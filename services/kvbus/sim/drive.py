"""Coroutines of production shells in virtual time: what they wait for are events of the world."""

from collections.abc import Callable, Coroutine, Generator
from typing import Any

from kvbus.errors import BusError

Resume = Callable[[Any], None]


class Wait:
    """Something that takes time. `begin` gets what to call with its result, a value or a BusError."""

    def __init__(self, begin: Callable[[Resume], None]) -> None:
        self.begin = begin

    def __await__(self) -> Generator["Wait", Any, Any]:
        result = yield self
        if isinstance(result, BusError):
            raise result
        return result


def drive(work: Coroutine[Any, Any, Any], done: Callable[[Any], None] | None = None) -> None:
    """Run `work` as far as it goes now, and on whenever what it waits for is there. `done` gets its result, or the
    BusError that ended it."""

    def step(value: Any) -> None:
        try:
            wait = work.send(value)
        except StopIteration as stop:
            result: Any = stop.value
        except BusError as error:
            result = error
        else:
            wait.begin(step)
            return
        if done is not None:
            done(result)

    step(None)

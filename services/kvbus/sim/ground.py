"""What all engines of a run stand on, and their holds on their loops."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvbus.engine.handle import EngineHandle
from kvbus.engine.settings import EngineSettings
from kvbus.sim.bus import Bus
from kvbus.sim.plane import Fabric
from kvbus.sim.presence import Presence
from kvbus.sim.weather import Weather
from kvbus.sim.world import World

if TYPE_CHECKING:
    from kvbus.sim.engine import SimEngine


class Ground:
    """What all engines of a run stand on."""

    def __init__(self, world: World, weather: Weather, settings: EngineSettings) -> None:
        self.world, self.weather, self.settings = world, weather, settings
        self.bus = Bus(world, weather)
        self.presence = Presence(world, weather)
        self.fabric = Fabric(world, weather)
        self.caching = {"prefill": True, "decode": True}
        self.after_step: Callable[[SimEngine], None] = lambda engine: None
        """Looks at an engine that has scheduled."""


class SimHandle(EngineHandle):
    """A hold on the simulated loop: a wait ends at once, and a notice wakes the loop."""

    def __init__(self, engine: "SimEngine") -> None:  # there is no engine core around it
        self._engine = engine

    @property
    def scheduler(self) -> Any:
        return self._engine.view

    def wait(self, seconds: float, ready: Callable[[], bool]) -> None:
        return

    def notify(self) -> None:
        self._engine.nudge(0.001)

    def wake_idle(self) -> None:
        self._engine.woken = True
        self._engine.nudge(0.001)

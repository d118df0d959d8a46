"""A request and its answer on the bus: to one of the reuse processes, which may answer late, twice, or never."""

from collections.abc import Callable

from kvbus.sim.bus import Bus, Member, Station, described
from kvbus.sim.world import World
from kvbus_schemas import Message, Post

Answered = Callable[[Message | None], None]


class Question:
    """`answered` gets the first answer, or None: at once where nobody listens, else after `wait_s`."""

    def __init__(self, bus: Bus, station: Station, message: Message, answered: Answered, *, wait_s: float) -> None:
        self.bus, self.station, self.message = bus, station, message
        self.world: World = bus.world
        self._answered: Answered | None = answered
        world, weather, rng = bus.world, bus.weather, bus.world.rng
        if world.tells:
            world.tell(station.name, message.key, f"asks {described(message)}")
        members = bus.members()
        if not (station.connected and members):
            world.after(0.001, station.process, self._end, None)
            return
        world.after(wait_s, station.process, self._end, None)
        if self._is_lost():
            return
        member = rng.choice(members)
        world.after(bus.delay_s(), member.station.process, self._arrive, member)
        if weather.duplicate and rng.random() < weather.duplicate:
            world.after(rng.random(), member.station.process, self._arrive, member)

    def _arrive(self, member: Member) -> None:
        if member.station.connected:
            member.asked(self.message, lambda answer: self._reply(member, answer))

    def _reply(self, member: Member, answer: Message) -> None:
        if self.bus.watch is not None:
            self.bus.watch(member.station, Post(self.station.name, answer))
        if self.world.tells:
            self.world.tell(member.station.process.name, answer.key, f"answers {described(answer)}")
        if member.station.connected and not self._is_lost():
            self.world.after(self.bus.delay_s(), self.station.process, self._end, answer)

    def _is_lost(self) -> bool:
        loss = self.bus.weather.loss
        return bool(loss) and self.world.rng.random() < loss / 2

    def _end(self, answer: Message | None) -> None:
        answered = self._answered
        if answered is not None and (answer is None or self.station.connected):
            self._answered = None
            answered(answer)

"""A decode that holds conversations is not taken for a full or a busy one, so that their next turns come back to it."""

from kvbus.router.fleet import Engine, Fleet
from kvbus.router.policies import RouteQuestion
from kvbus.router.policies_weighed import Weighed
from kvbus_schemas import EngineCard, LoadReported, Role

NOW_S = 100.0


def fleet_of(*names: str) -> Fleet:
    fleet = Fleet()
    for name in names:
        role: Role = "prefill" if name.startswith("p") else "decode"
        fleet.card_seen(
            EngineCard(
                engine_id=name, incarnation="i", role=role, model="m", http_url="", block_size=16, num_blocks=100
            )
        )
        fleet.load_seen(load(name), NOW_S)
    return fleet


def load(name: str, *, free: int = 100, held: int = 0, running: int = 0) -> LoadReported:
    return LoadReported(
        engine_id=name, source=name, incarnation="i", running=running, waiting=0, free_blocks=free, total_blocks=100,
        tokens_in_flight=0, held_blocks=held,
    )  # fmt: skip


def chosen(fleet: Fleet, holder: str = "", tokens: int = 0) -> str:
    def views(role: Role) -> list[Engine]:
        return fleet.alive(role)

    question = RouteQuestion(
        request_id="r", model="m", prompt_bytes=0, prompt_tokens=tokens + 100,
        prefills=[engine.view(NOW_S) for engine in views("prefill")],
        decodes=[engine.view(NOW_S, tokens if engine.engine_id == holder else 0) for engine in views("decode")],
    )  # fmt: skip
    return Weighed().choose(question).decode_id


def test_the_holder_is_preferred_however_much_it_holds_until_it_is_busier() -> None:
    fleet = fleet_of("p", "d0", "d1", "d2")
    fleet.load_seen(load("d1", free=50, held=50), NOW_S)
    assert chosen(fleet, "d1", 2000) == "d1"
    fleet.load_seen(load("d1", free=50, held=50, running=1), NOW_S)
    assert chosen(fleet, "d1", 2000) != "d1"


def test_blocks_of_running_requests_do_count_as_used() -> None:
    fleet = fleet_of("p", "d0", "d1")
    fleet.load_seen(load("d1", free=50, held=0), NOW_S)
    assert chosen(fleet, "d1", 2000) == "d0"


def test_what_was_sent_since_the_last_report_and_is_over_does_not_wait_there() -> None:
    fleet = fleet_of("d0")
    for _ in range(3):
        fleet.sent("d0")
    fleet.finished("d0")
    assert fleet.engines["d0"].view(NOW_S).waiting == 2
    fleet.load_seen(load("d0", running=2), NOW_S)
    fleet.finished("d0")  # the report still had it
    assert fleet.engines["d0"].view(NOW_S).waiting == 0

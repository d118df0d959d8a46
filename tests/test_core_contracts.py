"""Every core that does no I/O has a property test: any order, any duplication, same end. The list is pyproject's own,
so that a core which is added without one fails here."""

import importlib.util
import tomllib
from pathlib import Path

import pytest
from tests.node_ids import exists

ROOT = Path(__file__).parents[1]

INDEX = (
    "test_any_order_routing.py::test_an_index_that_says_exact_is_what_the_engine_holds_whatever_was_lost_or_repeated"
)
PROPERTIES = {
    "kvbus.matcher.core": "test_matcher_core.py::AnyOrderAnyDuplication",
    "kvbus.matcher.book": "test_matcher_core.py::AnyOrderAnyDuplication",
    "kvbus.matcher.checks": "test_matcher_core.py::AnyOrderAnyDuplication",
    "kvbus.matcher.engines": "test_matcher_core.py::AnyOrderAnyDuplication",
    "kvbus.matcher.tombstones": "test_matcher_core.py::AnyOrderAnyDuplication",
    "kvbus.reuse.core": "test_any_order_reuse.py::ReuseInAnyOrder",
    "kvbus.reuse.record": "test_any_order_reuse.py::ReuseInAnyOrder",
    "kvbus.conversations": "test_reuse_conversations.py::test_no_two_pairs_of_tenant_and_id_share_a_key",
    "kvbus.router.core": (
        "test_any_order_router.py::"
        "test_whatever_happens_to_a_dispatch_each_engine_is_cancelled_once_and_one_last_word_is_said"
    ),
    "kvbus.router.turn": (
        "test_any_order_router.py::test_a_claim_is_taken_or_let_go_once_whatever_happens_and_however_often"
    ),
    "kvbus.trace.core": ("test_any_order_router.py::test_a_story_is_the_same_in_whatever_order_its_lines_are_given"),
    "kvbus.engine.consumer": (
        "test_engine_consumer.py::test_any_order_and_duplication_ends_in_one_conclusion_and_one_last_word"
    ),
    "kvbus.engine.producer": "test_engine_producer.py::AnyOrder",
    "kvbus.engine.landing": "test_engine_landing.py::test_any_order_and_duplication_reports_the_request_once",
    "kvbus.engine.writing": "test_engine_writing.py::AnyOrder",
    "kvbus.engine.pushes": "test_engine_writing.py::AnyOrder",
    "kvbus.engine.peers": "test_any_order_router.py::PeersInAnyOrder",
    "kvbus.engine.retention": "test_any_order_reuse.py::RetentionInAnyOrder",
    "kvbus.engine.cache_events": INDEX,
    "kvbus.router.cache_index": INDEX,
    "kvbus.router.breaker": "test_any_order_routing.py::BreakerInAnyOrder",
    "kvbus.router.asking": (
        "test_any_order_routing.py::test_a_question_to_a_guest_is_settled_at_most_once_whatever_comes_and_however_often"
    ),
    "kvbus.router.due": (
        "test_any_order_routing.py::test_an_offer_is_expected_after_a_turns_end_and_no_more_once_it_is_taken"
    ),
    "kvbus.reuse.announced": (
        "test_any_order_routing.py::test_of_one_engines_announcements_the_newest_counts_in_any_order"
    ),
}
SHOWN = "only shows what was said, in the order of the trace"
PLANNED = "a seed in, a plan or a report out"
NO_STATE = {
    "kvbus.trace.phrases": "one message in, one phrase out",
    "kvbus.trace.split": "a story in, its stages out",
    "kvbus.trace.perfetto": "stories in, a document out",
    "kvbus.metrics.catalogue": "a list",
    "kvbus.router.policies": "one question in, one choice out; round robin counts its own questions",
    "kvbus.router.basis": "a record of why",
    "kvbus.engine.chain": "tokens in, digests out",
    "kvbus.engine.facts": "records and arithmetic",
    "kvbus.reuse.memory": "best effort: a reason to give, decides nothing",
    "kvbus.router.policies_spread": "as policies",
    "kvbus.router.policies_weighed": "as policies",
    "kvbus.router.offered": "a record of what a guest may choose from",
    "kvbus.router.answers": "one answer in, one choice out",
    "kvbus.router.canary": "a share and an id in, a verdict out",
    "kvbus.router.cache_prompt": "bytes in, digests out",
    "kvbus.router.cache_heads": "best effort: guesses how long a beginning is, decides nothing about blocks",
    "kvbus.trace.opinions": "a story in, opinions out",
    "kvbus.console.core": SHOWN,
    "kvbus.console.board": SHOWN,
    "kvbus.console.book": SHOWN,
    "kvbus.console.views": SHOWN,
    "kvbus.console.window": SHOWN,
    "kvbus.conformance.questions": "a seed in, questions out",
    "kvbus.conformance.judge": "an answer in, a verdict out",
    "kvbus.chaos.dice": PLANNED,
    "kvbus.chaos.plan": PLANNED,
    "kvbus.chaos.script": PLANNED,
    "kvbus.chaos.score": PLANNED,
    "kvbus.chaos.permissions": PLANNED,
    "kvbus.reuse.engines": "the cards of kvbus.presence, which time decides",
}
"""Modules of the same contract in which nothing that matters arrives in an order."""


def _contract() -> list[str]:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = config["tool"]["importlinter"]["contracts"]
    return next(list(each["source_modules"]) for each in contracts if each["name"] == "cores do no I/O")


@pytest.mark.parametrize("module", _contract())
def test_a_core_has_a_property_test_or_nothing_that_could_come_in_another_order(module: str) -> None:
    assert importlib.util.find_spec(module) is not None
    assert (module in PROPERTIES) != (module in NO_STATE), f"{module}: name its property test here"


@pytest.mark.parametrize(("module", "test"), PROPERTIES.items(), ids=PROPERTIES)
def test_the_property_test_exists_and_draws_its_cases(module: str, test: str) -> None:
    file, _, name = test.partition("::")
    assert exists(test), f"{test} of {module} is not there"
    assert "hypothesis" in (ROOT / "tests" / file).read_text(), name

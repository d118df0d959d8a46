"""The known faults of the stock protocol (vLLM 0.32, push and pull, and the routers before it), and why kvbus has not
got them: each by what must hold, with the tests that show it, or with the reason why it cannot happen here.

`tests/test_fault_table.py` checks that every test exists and that the README shows this table; print it with

    python tests/fault_table.py
"""

from typing import NamedTuple


class Fault(NamedTuple):
    """`upstream`: issues of vLLM, or of the project that is named; `must`: what must hold here."""

    key: str
    upstream: str
    must: str
    tests: tuple[str, ...] = ()
    cannot: str = ""


CONSUMER, PRODUCER, WRITING = "test_engine_consumer.py", "test_engine_producer.py", "test_engine_writing.py"
SIDE, RANK, LANDING = "test_engine_scheduler_side.py", "test_engine_rank.py", "test_engine_landing.py"
MATCHER, ENDS, FAULTS = "test_matcher_core.py", "vllm/test_ends.py", "vllm/test_faults.py"

EDGE_CASES: tuple[Fault, ...] = (
    Fault("1", "46283, 46289", "Blocks of a decode that left come back, whether prefill is dead or alive", (
        f"{CONSUMER}::test_an_aborted_request_is_given_back_without_a_failure",
        f"{CONSUMER}::test_a_dead_producers_blocks_come_back_only_after_its_longest_write",
        f"{ENDS}::test_client_gone_while_prefill_computes",
    )),
    Fault("2", "50754, 48633", "A WRITE that fails on one rank is told to decode at once", (
        f"{RANK}::test_a_write_that_cannot_be_posted_is_told_to_the_consumer",
        f"{RANK}::test_a_write_that_fails_under_way_is_told_to_the_consumer",
        f"{WRITING}::test_a_write_that_fails_is_told_to_the_consumer_once",
    )),
    Fault("3", "55470", "No WRITE starts after its lease, however long the handshake took", (
        f"{RANK}::test_a_handshake_that_outlives_the_consumers_lease_writes_nothing",
        f"{WRITING}::test_an_order_whose_lease_is_over_writes_nothing",
    )),
    Fault("4", "56585", "Crafted kv_transfer_params never raise in a hook", (
        f"{SIDE}::test_whatever_stands_in_the_transfer_params_no_hook_raises",
        f"{FAULTS}::test_crafted_transfer_params_never_reach_the_engine_loop",
        f"{ENDS}::test_a_bad_ticket_is_a_clear_400",
    )),
    Fault("5", "45688, 34415, 38816, 34747", "Nothing is matched by a request id, whatever the engines make of it", (
        f"{MATCHER}::test_keys_are_opaque_so_that_the_prompts_of_one_request_have_a_transfer_each",
        f"{SIDE}::test_the_same_request_id_twice_is_two_transfers_that_never_meet",
    )),
    Fault("6", "(found by running its code)", "One X-Request-Id for two requests mixes nothing up", (
        f"{FAULTS}::test_one_request_id_for_several_requests_never_mixes_them_up",
        f"{ENDS}::test_different_prompts_under_one_ticket_are_never_mixed",
    )),
    Fault("7", "49796", "A transfer id that is used again, by whomever, opens no second transfer", (
        f"{MATCHER}::test_of_two_registrations_the_first_one_stands",
        f"{PRODUCER}::test_a_ticket_that_is_used_again_is_ignored",
        "test_router_limits.py::test_kv_transfer_params_of_a_client_are_refused",
        f"{ENDS}::test_a_ticket_used_twice_is_answered_right_and_transfers_once",
    )),
    Fault("8", "43226, 46240, 48615, 48616, 48821, 53049", "A known request is reported to vLLM once", (
        f"{SIDE}::test_a_request_is_reported_to_vllm_once_and_a_repeat_or_a_stranger_is_taken_out",
        f"{SIDE}::test_a_prefill_in_a_reuse_may_end_both_of_its_transfers_in_one_step",
        f"{ENDS}::test_every_notice_delivered_twice_changes_nothing",
    )),
    Fault("9", "21570, aws-do-eks 84", "Decode starts on what has landed for this very transfer", (
        f"{LANDING}::test_the_last_missing_block_reports_the_request",
        f"{LANDING}::test_notes_after_the_end_are_dropped",
        f"{PRODUCER}::test_a_finished_request_is_ready_and_held",
    )),
    Fault("10", "58222, 50789", "Leases of all lengths end each at its own time", (
        f"{SIDE}::test_deadlines_of_all_lengths_end_each_at_its_own_time",
    )),
    Fault("11", "29906", "An abort that races with the end of a request leaves nothing behind", (
        f"{PRODUCER}::AnyOrder",
        f"{PRODUCER}::test_what_is_released_while_it_computes_is_released_when_it_has_finished",
        f"{FAULTS}::test_a_request_that_is_aborted_just_when_it_finishes_leaves_nothing_behind",
    )),
    Fault("12", "41269", "Prefill lets go at once when decode refuses the request", (
        "test_router_http.py::test_a_client_error_of_decode_is_passed_on_and_cancels_prefill",
        f"{PRODUCER}::test_the_consumers_last_word_and_a_cancel_release",
        f"{ENDS}::test_client_gone_before_the_transfer",
    )),
    Fault("13", "llm-d 1138", "A request that nobody owns between its legs ends with its lease", (
        f"{PRODUCER}::test_what_nobody_fetched_within_the_deadline_is_given_up_once",
        f"{ENDS}::test_decode_never_comes_and_the_lease_ends",
    )),
    Fault("14", "43509", "Several answers to one prompt take one push, and free its blocks once", (
        f"{SIDE}::test_of_several_sequences_of_one_prompt_one_takes_the_push_and_the_others_ask_again",
        "vllm/test_push.py::test_several_answers_to_one_prompt_take_one_push",
    )),
    Fault("15", "18632, 25267", "A prompt that decode has whole frees prefill at once", (
        f"{SIDE}::test_a_decode_whose_prompt_is_here_already_closes_its_transfer_at_once",
        f"{MATCHER}::test_a_full_prefix_hit_registers_no_blocks_and_is_ordered",
        "vllm/test_push.py::test_a_prompt_that_decode_has_whole_is_not_sent_at_all",
    )),
    Fault("16", "50558", "Two sides whose prompts differ, by a token or by all, exchange nothing", (
        f"{WRITING}::test_different_prompts_are_refused",
        f"{MATCHER}::test_a_registration_that_contradicts_readiness_is_refused",
    )),
    Fault("17", "48141, 50297", "Blocks that a preemption takes away are written by nobody", (
        f"{WRITING}::test_preempted_blocks_are_written_no_more_and_the_new_ones_are",
        "vllm/test_shapes.py::test_preemption_on_either_side",
    )),
    Fault("18", "18631, 30419", "A preemption between chunks, or after the push, costs time and no token", (
        f"{WRITING}::test_what_was_written_before_a_preemption_is_not_written_again",
        "vllm/test_shapes.py::test_preemption_on_either_side",
    )),
    Fault("19", "53706", "Models with several KV cache groups are refused at start", (
        f"{FAULTS}::test_what_kvbus_cannot_hand_over_is_refused_at_start",
    ), cannot="a full hit with a state of Mamba: such models have several KV cache groups"),
    Fault("20", "49238, smg 2382", "An engine that was started again under its name is met anew", (
        f"{RANK}::test_a_peer_that_comes_back_under_its_name_is_met_anew_and_the_old_one_forgotten",
        f"{ENDS}::test_prefill_killed_while_it_computes",
        f"{ENDS}::test_decode_killed_while_prefill_computes",
    )),
    Fault("21", "58063", "A peer that is gone is let go of at once, not at the next handshake", (
        f"{RANK}::test_a_peer_that_is_gone_is_let_go_of_at_once_with_its_memory",
    )),
    Fault("22", "27083", "A leg that reaches another engine than its ticket names is refused", (
        "test_schemas.py::test_a_ticket_that_cannot_be_honoured_says_why",
        f"{MATCHER}::test_a_registration_for_an_incarnation_not_seen_yet_waits_and_then_names_both",
    )),
    Fault("23", "52234, 52276", "A failed receive is recomputed, and an offer is good once", (
        f"{LANDING}::test_a_conclusion_gives_the_request_back_whatever_has_landed",
        f"{ENDS}::test_prefill_aborted_while_it_computes",
        "test_any_order_reuse.py::ReuseInAnyOrder",
    )),
    Fault("24", "43094, 44838", "History that was changed or stripped is reused up to the first difference", (
        "vllm/test_reuse_history.py::test_a_changed_prompt_is_reused_up_to_the_change",
    )),
    Fault("25", "47021", "An offer past its end is given to nobody, and its turn is computed", (
        "test_engine_retention.py::test_an_expired_offer_is_given_to_nobody",
        "test_reuse_service.py::test_lifetimes_end_on_time_whatever_was_looked_up_or_repeated",
        "vllm/test_reuse_faults.py::test_a_key_whose_blocks_are_gone_costs_no_wait",
    )),
    Fault("26", "llm-d-router 2432, 2831", "Two tenants with the same ids never meet, and streams reuse too", (
        "test_reuse_conversations.py::test_no_two_pairs_of_tenant_and_id_share_a_key",
        "test_router_claims.py::test_two_tenants_with_one_id_never_meet",
        "vllm/test_reuse_history.py::test_twenty_turns_that_follow_each_other_at_once_all_hit",
    )),
    Fault("27", "36958", "Every rank is released where the two sides have different numbers of them", (
        f"{LANDING}::test_with_twice_the_ranks_there_two_of_them_write_here",
        f"{CONSUMER}::test_one_rank_that_is_quiet_twice_is_one_rank",
        "vllm/test_shapes.py::test_prefill_with_one_rank_pushes_to_decode_with_two",
    )),
    Fault("28", "45174, 45177, llm-d-router 1737", "A hole in what a sender says is seen", (
        "test_bus.py::test_a_gap_is_counted_once_per_missing_message",
        "test_bus.py::test_a_subscription_to_everything_counts_gaps",
    )),
    Fault("29", "50719, 50984", "Every failure ends the wait, whatever comes with it or after it", (
        f"{CONSUMER}::test_any_order_and_duplication_ends_in_one_conclusion_and_one_last_word",
        f"{CONSUMER}::test_an_end_is_told_to_the_producer_and_waits_for_every_rank_to_be_quiet",
    )),
    Fault("30", "sglang 29482", "When one leg fails, the other is told", (
        "test_router_http.py::test_a_client_that_leaves_cancels_both_legs",
        "test_any_order_router.py::test_when_the_client_leaves_no_leg_stays_open_whatever_came_before",
        "test_router_http.py::test_decode_failing_before_the_first_byte_means_another_dispatch",
    )),
)  # fmt: skip
"""Edge cases that were reported upstream."""

PUSH_FAILURES: tuple[Fault, ...] = (
    Fault("a", "handshake to prefill fails", "Decode computes by itself what its prefill cannot bring", (
        f"{SIDE}::test_a_decode_computes_by_itself_what_its_prefill_cannot_bring",
    )),
    Fault("b", "registration is not sent to a rank", "A registration that brings nothing is said again", (
        f"{CONSUMER}::test_a_registration_that_brings_nothing_is_said_again_with_what_is_left_of_its_lease",
        "test_matcher_service.py::test_a_registration_made_while_no_matcher_ran_is_ordered_by_the_next",
    )),
    Fault("c", "handshake to decode fails", "A handshake that fails is told to decode", (
        f"{RANK}::test_a_handshake_that_fails_is_told_to_the_consumer_and_the_blocks_come_back",
    )),
    Fault("d", "WRITE fails to post or to execute", "Decode hears it from the rank, not from a time-out", (
        f"{RANK}::test_a_write_that_cannot_be_posted_is_told_to_the_consumer",
        f"{RANK}::test_a_write_that_fails_under_way_is_told_to_the_consumer",
    )),
    Fault("e", "prefill aborts, errs or is preempted at its end", "Whatever ends a prefill, decode hears it at once", (
        f"{SIDE}::test_a_prefill_that_ends_by_anything_but_its_length_or_a_stop_tells_its_consumer",
        f"{PRODUCER}::test_an_aborted_request_is_told_to_its_consumer_at_once",
        f"{ENDS}::test_prefill_aborted_while_it_computes",
    )),
    Fault("f", "prefill crashes", "The decodes of a dead prefill go on without it", (
        f"{SIDE}::test_the_consumers_of_a_dead_prefill_go_on_without_it",
        f"{MATCHER}::test_when_a_producer_is_gone_its_consumers_are_told_at_once",
        f"{ENDS}::test_prefill_killed_while_it_computes",
    )),
    Fault("g", "decode registers after the lease", "A late registration is answered with what became of the blocks", (
        f"{MATCHER}::test_unavailable_blocks_are_told_to_a_consumer_that_registers_later",
        f"{ENDS}::test_decode_comes_after_prefill_gave_up",
    )),
    Fault("h", "handshake outlives the lease", "As 3: no WRITE out of blocks that may be another's", (
        f"{RANK}::test_a_handshake_that_outlives_the_consumers_lease_writes_nothing",
    )),
    Fault("i", "full prefix hit on decode", "As 15; and no entry stays behind on the ranks", (
        f"{CONSUMER}::test_a_skipped_ticket_closes_at_once_and_once",
        "test_writing_early_ends.py::test_a_close_that_came_before_the_request_lets_its_blocks_go_at_its_end",
    )),
    Fault("j", "decode refuses before scheduling", "Its end frees prefill at once", (
        f"{SIDE}::test_decode_says_at_once_that_a_request_has_ended_before_it_was_scheduled",
        f"{SIDE}::test_prefill_says_at_once_that_a_request_has_ended_before_it_was_scheduled",
        f"{FAULTS}::test_a_decode_request_that_ends_before_it_was_scheduled_frees_prefill_at_once",
    )),
    Fault("k", "decode aborts while it waits", "Its blocks come back when prefill is quiet; till then it sleeps", (
        f"{SIDE}::test_a_decode_that_leaves_while_it_waits_gets_its_blocks_back_only_when_prefill_is_quiet",
        f"{ENDS}::test_an_engine_that_waits_takes_less_than_a_tenth_of_a_core",
    )),
    Fault("l", "decode preempted after the load", "Its ticket is used: it computes, and registers nothing again", (
        f"{SIDE}::test_a_ticket_that_is_used_again_is_served_without_a_transfer",
        "vllm/test_shapes.py::test_preemption_on_either_side",
    )),
    Fault("m", "heartbeats without effect", "A lease is renewed by nobody: it has one end, known to both sides",
          cannot="there are no heartbeats; a transfer's deadline is in its ticket"),
    Fault("n", "completion counted, not named", "Decode keeps the set of (rank, block) that has landed", (
        f"{LANDING}::test_a_note_that_comes_twice_counts_once",
        f"{LANDING}::test_any_order_and_duplication_reports_the_request_once",
    )),
    Fault("o", "watchdog that only warns", "A transfer's deadline ends it", (
        f"{CONSUMER}::test_a_deadline_that_passes_expires_the_transfer",
        f"{ENDS}::test_prefill_never_comes_and_decode_computes_at_its_deadline",
    )),
    Fault("p", "push and reuse exclude each other", "They work in one conversation", (
        f"{SIDE}::test_a_prefill_in_a_reuse_may_end_both_of_its_transfers_in_one_step",
        "vllm/test_reuse_history.py::test_twenty_turns_that_follow_each_other_at_once_all_hit",
    )),
    Fault("q", "a dead peer's handshake blocks all others", "Handshakes run outside of transfers, on cards",
          cannot="there is no side channel to ask: metadata is in the peer's card"),
    Fault("r", "an exception drops one item of the writer", "What was ordered is written, or told as failed", (
        f"{RANK}::test_a_write_that_cannot_be_posted_is_told_to_the_consumer",
        f"{WRITING}::AnyOrder",
    )),
)  # fmt: skip
"""Failures of the stock push protocol itself."""

FENCES: tuple[Fault, ...] = (
    Fault("presence lease", "", "An engine whose card is gone is counted as dead, and a card that came back is not", (
        f"{CONSUMER}::test_a_producer_that_comes_back_in_time_is_not_fenced",
        "test_bus_buckets.py::"
        "test_a_watcher_that_was_stopped_for_longer_than_a_lifetime_does_not_take_the_living_for_dead",
        "test_matcher_parts.py::test_a_card_that_vanished_with_its_server_is_gone_only_after_its_lease",
    )),
    Fault("self-fencing writer", "", "A rank that does not see its own card submits nothing, later nothing old", (
        f"{RANK}::test_a_rank_whose_engine_is_not_seen_on_the_bus_submits_nothing",
        f"{WRITING}::test_without_presence_nothing_is_written_until_it_is_back",
        f"{WRITING}::test_an_order_from_before_a_lapse_of_presence_is_refused",
    )),
    Fault("longest WRITE", "", "A WRITE is given up after 5 s, and a dead writer's blocks come back only after that", (
        f"{WRITING}::test_a_write_is_overdue_after_the_longest_that_it_may_take",
        f"{CONSUMER}::test_a_dead_producers_blocks_come_back_only_after_its_longest_write",
        "test_any_order_router.py::PeersInAnyOrder",
    )),
    Fault("quiesce before free", "", "A WRITE in flight when its consumer cancels cannot land in freed blocks", (
        f"{RANK}::test_nothing_is_quiet_while_a_write_is_in_flight",
        f"{WRITING}::test_a_cancel_is_answered_only_when_nothing_is_in_flight",
        f"{SIDE}::test_a_decode_that_leaves_while_it_waits_gets_its_blocks_back_only_when_prefill_is_quiet",
        f"{ENDS}::test_client_gone_while_prefill_computes",
    )),
    Fault("tombstones", "", "What has ended is never opened again by what comes late", (
        f"{MATCHER}::test_a_closed_transfer_is_forgotten_and_never_opened_again",
        f"{MATCHER}::test_tombstones_go_after_their_time_and_never_pass_their_limit",
        f"{WRITING}::test_a_cancel_before_anything_is_answered_and_nothing_is_written_afterwards",
    )),
    Fault("incarnations", "", "What a former life of an engine said or was promised counts for nothing", (
        f"{CONSUMER}::test_a_strangers_or_a_later_incarnations_quiet_counts_for_nothing",
        f"{MATCHER}::test_an_old_incarnation_that_expires_late_ends_nothing",
        "test_reuse_service.py::test_an_engine_that_is_gone_or_has_restarted_grants_nothing_and_its_keys_go",
    )),
    Fault("standby matcher", "", "It takes over within 3 s by lease, and catches up from the stream", (
        "test_matcher_service.py::test_a_standby_takes_over_within_three_seconds_and_knows_what_happened",
        "test_matcher_parts.py::test_of_two_that_want_a_lease_one_holds_it_and_stops_before_the_other_starts",
        f"{ENDS}::test_the_matcher_is_killed_and_started_again_in_the_middle",
    )),
)  # fmt: skip
"""What keeps rule 1."""


def markdown() -> str:
    """The tables as they stand in the README."""
    parts = []
    for heads, faults in (
        (("#", "fault upstream", "what must hold", "shown by"), EDGE_CASES),
        (("", "failure of the stock push", "what must hold", "shown by"), PUSH_FAILURES),
        (("fence", "what must hold", "shown by"), FENCES),
    ):
        rows = [heads, tuple("---" for _ in heads), *(_row(fault) for fault in faults)]
        parts.append("\n".join(f"| {' | '.join(cells)} |" for cells in rows))
    return "\n\n".join(parts)


def _row(fault: Fault) -> tuple[str, ...]:
    shown = ", ".join(f"`{test}`" for test in fault.tests)
    if fault.cannot:
        shown = f"{shown}; cannot happen: {fault.cannot}" if shown else f"cannot happen: {fault.cannot}"
    return (fault.key, *((fault.upstream,) if fault.upstream else ()), fault.must, shown)


if __name__ == "__main__":
    print(markdown())  # noqa: T201  (a command line prints)

"""A campaign's result as JSON and as lines."""

from typing import Any

import msgspec

from kvbus.bench.report import Arm, Metric, Report, metric
from kvbus.chaos.campaign import Options, Result
from kvbus.chaos.score import Score, label

SECONDS_DIGITS = 2


def report_of(result: Result) -> Report:
    """One object as `kvbus bench --json` prints it: an arm of counts, and one of times for each kind of fault."""
    counted = result.score
    counts = {
        "requests": counted.requests,
        "right": counted.verdicts.get("right", 0),
        "clear_errors": counted.verdicts.get("error", 0) - len(counted.unclear),
        "unclear_errors": len(counted.unclear),
        "wrong_tokens": counted.verdicts.get("wrong", 0),
        "hangs": counted.verdicts.get("hang", 0),
        "blocks_lost": sum(counted.blocks_lost.values()),
        "processes_crashed": len(counted.crashed),
        "starts_refused": counted.starts_refused,
        "never_recovered": len(counted.never_recovered),
        "forgeries_let_through": counted.forgeries_heard,
        "dead_letters": counted.dead_letters,
        "reuse_hits": counted.reuse_hits,
        "faults": counted.faults,
    }
    arms = [Arm("all", {name: Metric(p50=value, p99=value, n=1) for name, value in counts.items()})]
    for kind, times in sorted(counted.recoveries.items()):
        arms.append(Arm(kind, {"recover_s": metric([times])}, note=f"max {max(times):.1f} s"))
    conditions = {
        "seed": result.options.seed,
        "engine": result.options.engine,
        "command": command_of(result.options),
        "errors": counted.errors,
        "transfers": counted.closed,
        "faults": counted.faults_by_kind,
        "broken": counted.broken(),
        "load_s": round(result.load_s, 1),
    }
    return Report("chaos", arms, conditions)


def command_of(options: Options) -> str:
    """What reproduces the schedule."""
    words = ["kvbus chaos", f"--seed {options.seed}", f"--faults {options.faults}", f"--engine {options.engine}"]
    words += [f"--prefill {options.prefill}", f"--decode {options.decode}"]
    words += ["--quick"] * options.quick + [f"--kinds {','.join(options.kinds)}"] * bool(options.kinds)
    return " ".join(words)


def lines_of(result: Result) -> list[str]:
    """What a person reads at the end."""
    counted, verdicts = result.score, result.score.verdicts
    unclear = len(counted.unclear)
    rate = counted.requests / max(result.load_s, 1e-9)
    lines = [
        f"{counted.faults} faults in {result.load_s:.0f} s under {result.options.concurrency} requests at a time",
        f"{counted.requests} requests ({rate:.1f} a second): {verdicts.get('right', 0)} right, "
        f"{verdicts.get('error', 0) - unclear} clear errors, {unclear} unclear errors, "
        f"{verdicts.get('wrong', 0)} with wrong tokens, {verdicts.get('hang', 0)} hanging",
        f"errors: {_listed(counted.errors)}",
        f"transfers: {_listed(counted.closed)}; {counted.reuse_hits} turns reused KV; modes: {_listed(counted.modes)}",
        f"blocks lost: {sum(counted.blocks_lost.values())}; processes that ended by themselves: "
        f"{len(counted.crashed)}, and {counted.starts_refused} that were started without NATS; "
        f"forgeries let through: {counted.forgeries_heard}; dead letters: {counted.dead_letters}",
        "",
        "seconds until requests through that part are right again, from the fault's end:",
        *_recovery_lines(counted),
    ]
    return lines + _what_went_wrong(result)


def _recovery_lines(counted: Score) -> list[str]:
    rows = [f"  {'fault':16} {'n':>4} {'median':>8} {'longest':>8}"]
    for kind, count in sorted(counted.faults_by_kind.items()):
        times = sorted(counted.recoveries.get(kind, []))
        middle = f"{metric([times]).p50:8.1f} {times[-1]:8.1f}" if times else f"{'-':>8} {'-':>8}"
        rows.append(f"  {kind:16} {count:4} {middle}")
    return rows


def _what_went_wrong(result: Result) -> list[str]:
    broken = result.score.broken()
    if not broken:
        return ["", f"everything that must be zero is zero; seed {result.options.seed}"]
    lines = ["", *broken]
    lines += [f"  {outcome.request_id}: {outcome.verdict} {outcome.status} {outcome.code} {outcome.detail} "
              f"({outcome.mode}, {outcome.prefill_id} -> {outcome.decode_id}, {outcome.closed}, {outcome.transfer_id})"
              for outcome in result.outcomes
              if outcome.verdict in ("wrong", "hang") or outcome.request_id in result.score.unclear]  # fmt: skip
    lines += [f"  {name}" for name in (*result.score.crashed, *result.score.never_recovered)]
    lines += [f"  {engine_id}: {count} blocks" for engine_id, count in result.score.blocks_lost.items() if count]
    return [*lines, f"again: {command_of(result.options)}"]


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"


def whole(result: Result) -> bytes:
    """Everything, for `--report`."""
    faults: list[dict[str, Any]] = [
        {
            "number": one.fault.number,
            "what": label(one.fault),
            "target": one.fault.target,
            "way": one.fault.way,
            "began_s": round(one.began_s, SECONDS_DIGITS),
            "ended_s": round(one.ended_s, SECONDS_DIGITS),
            "recovered_after_s": None if one.took_s is None else round(one.took_s, SECONDS_DIGITS),
            "shown_by": one.shown_by,
            "note": one.note,
        }
        for one in result.happened
    ]
    document = {
        "report": report_of(result),
        "faults": faults,
        "not_right": result.outcomes,
        "stories": result.stories,
        "crash_logs": result.crash_logs,
        "dead_letters": result.score.dead_letters,
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=1)

"""`kvbus bench`: measurements as ratios of things that ran in turn."""

import typer

bench = typer.Typer(no_args_is_help=True, help="Measure: every figure is a ratio of arms that ran in turn.")


def register(app: typer.Typer) -> None:
    """Add `kvbus bench`."""
    from kvbus.bench.capture import register_bench as register_capture
    from kvbus.bench.goodput import register_bench as register_goodput
    from kvbus.bench.handoff import register_bench as register_handoff
    from kvbus.bench.multiturn import register_bench as register_multiturn
    from kvbus.bench.policies import register_bench as register_policies
    from kvbus.bench.reuse import register_bench as register_reuse
    from kvbus.bench.route import register_bench as register_route
    from kvbus.bench.router import register_bench as register_router
    from kvbus.bench.traffic import register_bench as register_traffic
    from kvbus.bench.workload import register_bench as register_workload

    register_handoff(bench)
    register_router(bench)
    register_reuse(bench)
    register_multiturn(bench)
    register_workload(bench)
    register_capture(bench)
    register_traffic(bench)
    register_policies(bench)
    register_goodput(bench)
    register_route(bench)
    app.add_typer(bench, name="bench")

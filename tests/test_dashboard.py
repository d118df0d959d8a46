"""The dashboard and the alerts: every metric that they name is served by real processes, every query is PromQL."""

import asyncio
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import aiohttp
import promql_parser
import pytest
import yaml
from tests.metrics_world import ALERTS, DASHBOARD, ROOT, Samples, expressions, named_in, panels, samples_of, total

from kvbus.cli.schema import Form, document
from kvbus.local.fleet import Fleet, FleetOptions, start_fleet
from kvbus.metrics.catalogue import BY_NAME, SECTIONS

WORDS = "Everything that is decided inside the engines becomes a subscriber that can be watched. " * 6
PROMTOOL = os.environ.get("KVBUS_PROMTOOL") or shutil.which("promtool")
STAGES = 8
SEEN_MAX_S = 20.0


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


QUERIES = [*expressions(), *((rule["alert"], rule["expr"]) for rule in rules())]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Samples]:
    """What every process of a light fleet serves after three conversations of three turns."""
    return asyncio.run(asked(tmp_path_factory.mktemp("fleet")))


async def asked(work_dir: Path) -> dict[str, Samples]:
    """Prefill has so few blocks that its own cache forgets what decode has kept."""
    options = FleetOptions(
        engine="sim", work_dir=work_dir, metrics=True, console=True, prefill_arguments=["--blocks", "60"]
    )
    async with start_fleet(options) as fleet, aiohttp.ClientSession() as http:
        for turn in range(3):
            for number in range(3):
                await converse(fleet, http, number, turn)
        return await scraped(fleet, http)


async def converse(fleet: Fleet, http: aiohttp.ClientSession, number: int, turn: int) -> None:
    prompt = "".join(f"{number} {said} {WORDS}" for said in range(turn + 1))
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 6, "ignore_eos": True, "conversation_id": str(number)}
    early = {"X-Kvbus-Mode": "early"}  # whatever the policy thinks of so short a prompt
    async with http.post(fleet.base_url + "/v1/completions", json=body, headers=early) as answer:
        assert answer.status == 200, await answer.text()


async def scraped(fleet: Fleet, http: aiohttp.ClientSession) -> dict[str, Samples]:
    """Every page, once the observer has seen the last request."""
    async with asyncio.timeout(SEEN_MAX_S):
        while True:
            found = {}
            for name, url in fleet.metrics_urls.items():
                async with http.get(url) as page:
                    found[name] = samples_of(await page.text())
            if total(found["observer"], "kvbus_observer_ttft_seconds_count") >= 9:
                return found
            await asyncio.sleep(0.2)


@pytest.mark.nats
@pytest.mark.parametrize(("where", "query"), QUERIES, ids=[f"{n} {where}" for n, (where, _) in enumerate(QUERIES)])
def test_every_metric_that_is_named_is_served(pages: dict[str, Samples], where: str, query: str) -> None:
    served = {name for page in pages.values() for name in page} | {"up"}
    assert named_in(query) <= served, where


@pytest.mark.nats
def test_what_is_served_is_what_is_listed(pages: dict[str, Samples]) -> None:
    listed = {metric.exposed for metric in BY_NAME.values()}
    for page in pages.values():
        ours = {name for name in page if name.startswith("kvbus_") and not name.endswith("_created")}
        bare = {name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") for name in ours}
        assert {name for name in bare if name not in listed and name.removesuffix("_total") not in listed} == set()


@pytest.mark.nats
def test_every_process_serves_its_section(pages: dict[str, Samples]) -> None:
    sections = {title.strip("`").removeprefix("kvbus "): metrics for title, metrics in SECTIONS}
    of = {"Engines": "prefill-0", "router": "router-0", "matcher": "matcher-0", "reuse": "reuse-0"}
    for title, metrics in sections.items():
        everybody = [page for name, page in pages.items() if name != "console"]
        for page in everybody if title.startswith("Every") else [pages[of.get(title, title)]]:
            missing = {m.exposed for m in metrics if m.kind != "histogram"} - page.keys()
            missing |= {m.name for m in metrics if m.kind == "histogram" and f"{m.name}_bucket" not in page}
            assert not missing, (title, missing)


@pytest.mark.nats
def test_the_stages_add_up_to_the_time_to_first_token(pages: dict[str, Samples]) -> None:
    observer = pages["observer"]
    stages = observer["kvbus_observer_stage_seconds_sum"]
    assert len(stages) == STAGES
    whole = total(observer, "kvbus_observer_ttft_seconds_sum")
    assert sum(value for _, value in stages) == pytest.approx(whole, abs=1e-4)
    assert whole == pytest.approx(total(pages["router-0"], "kvbus_router_ttft_seconds_sum"), rel=1e-3)
    assert total(observer, "kvbus_observer_stage_seconds_sum", stage="prefill") > 0


@pytest.mark.nats
def test_engines_count_what_they_did(pages: dict[str, Samples]) -> None:
    prefill, decode, router = pages["prefill-0"], pages["decode-0"], pages["router-0"]
    pushed = total(prefill, "kvbus_engine_handoff_seconds_count", kind="push")
    assert pushed == total(decode, "kvbus_engine_transfers_total", kind="push", outcome="completed") > 0
    assert total(prefill, "kvbus_engine_written_bytes_total", kind="push") > 0
    assert total(decode, "kvbus_engine_offers_total") == 9
    assert total(decode, "kvbus_engine_held_conversations") == 3
    assert total(decode, "kvbus_engine_held_blocks") == total(router, "kvbus_router_held_blocks") > 0
    taken = total(prefill, "kvbus_engine_reuse_taken_tokens_total")
    assert taken == total(router, "kvbus_router_reuse_tokens_total") > 0
    assert sum(value for _, value in prefill["kvbus_engine_reuse_claims_total"]) == 6, "a grant for every later turn"
    assert total(pages["observer"], "kvbus_observer_missing_messages_total") == 0
    assert total(pages["matcher-0"], "kvbus_matcher_active") == 1


@pytest.mark.parametrize(("where", "query"), QUERIES, ids=[f"{n} {where}" for n, (where, _) in enumerate(QUERIES)])
def test_every_query_is_promql(where: str, query: str) -> None:
    promql_parser.parse(query)  # raises
    assert where


def test_every_panel_says_what_it_shows_in_which_unit() -> None:
    for panel in panels():
        assert panel["title"]
        assert len(panel["description"]) > 20, panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert all(target["legendFormat"] for target in panel["targets"]), panel["title"]
    assert len({panel["id"] for panel in panels()}) == len(panels())


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


def test_grafana_is_told_where_the_dashboard_is() -> None:
    services = yaml.safe_load((ROOT / "compose" / "compose.yaml").read_text())["services"]
    provisioning = ROOT / "compose" / "grafana" / "provisioning"
    source = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"][0]
    where = yaml.safe_load((provisioning / "dashboards" / "kvbus.yml").read_text())["providers"][0]["options"]["path"]
    mounts = dict(volume.split(":")[:2] for volume in services["grafana"]["volumes"])
    assert mounts["./" + str(DASHBOARD.parent.relative_to(ROOT / "compose"))] == where
    assert mounts["./grafana/provisioning"] == "/etc/grafana/provisioning"
    assert source["url"] == "http://prometheus:9090"
    assert source["uid"] == "prometheus"


def test_prometheus_asks_every_process_on_the_port_where_it_answers() -> None:
    services = yaml.safe_load((ROOT / "compose" / "compose.yaml").read_text())["services"]
    config = yaml.safe_load((ROOT / "compose" / "prometheus" / "prometheus.yml").read_text())
    asked: dict[str, int] = {}
    for job in config["scrape_configs"]:
        (found,) = job["dns_sd_configs"]
        asked |= dict.fromkeys(found["names"], found["port"])
    ours = {name for name, service in services.items() if service.get("image") in ("kvbus-router", "kvbus-engine")}
    engines = {"prefill", "decode", "light-prefill", "light-decode"}
    assert set(asked) == ours | {"router", "matcher", "reuse", "observer", "console"} | engines
    for name, port in asked.items():
        service = services[name]
        listens = [str(entry).rsplit(":", 1)[1] for entry in service.get("ports", [])] + service.get("expose", [])
        assert str(port) in listens, name


@pytest.mark.skipif(PROMTOOL is None, reason="needs promtool: apt-get install prometheus, or KVBUS_PROMTOOL")
@pytest.mark.parametrize("command", [("check", "rules", "alerts.yml"), ("test", "rules", "alerts_test.yml")])
def test_the_alert_rules_do_what_they_say(command: tuple[str, ...]) -> None:
    done = subprocess.run(
        [str(PROMTOOL), *command], cwd=ALERTS.parent, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_readme_lists_every_metric() -> None:
    """`kvbus schema metrics` is what stands between the marks."""
    shown = (ROOT / "README.md").read_text().split("<!-- metrics -->\n")[1].split("<!-- end of metrics -->")[0]
    assert shown.strip() == document(Form.METRICS).strip()

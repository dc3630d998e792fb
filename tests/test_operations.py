"""The dashboard and the alerts ask for what is exported: names, labels, values of labels, rates of counters alone."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from coldblock.engine_core.control.scheduler import Scheduler, SchedulerConfig
from coldblock.engine_core.device.executor import LinkPeak
from coldblock.engine_core.stats import EngineStats
from coldblock.frontend.metrics import HttpMetrics, render
from fake_engine import MODEL
from prometheus_client.parser import text_string_to_metric_families
from promql import Query, Selector

FOLDER = Path(__file__).parents[1] / "docs" / "operations"
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "grafana-dashboard.json").read_text(encoding="utf-8"))
ALERTS: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((FOLDER / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
TARGETS = [(f"{panel['title']}: {target['expr']}", target) for panel in PANELS for target in panel["targets"]]
VARIABLES = [v["query"]["query"] for v in DASHBOARD["templating"]["list"] if v["type"] == "query"]
EXPRESSIONS = [
    *(target["expr"] for _, target in TARGETS),
    *(annotation["expr"] for annotation in DASHBOARD["annotations"]["list"]),
    *(rule["expr"] for rule in ALERTS),
]
OF_THE_SCRAPE = {"job", "instance"}  # Prometheus adds them
OPEN_VALUES = {"model_name", "engine", "endpoint", "path", "status"}  # not known before something runs


class Exported:
    """All that `/metrics` can show of an engine and a frontend: series by sample name, and which are counters."""

    def __init__(self) -> None:
        scheduler = Scheduler(
            SchedulerConfig(
                block_size=16,
                num_gpu_blocks=8,
                num_cpu_blocks=8,
                block_bytes=100,
                max_model_len=64,
                max_num_seqs=4,
                max_num_batched_tokens=64,
                prefill_chunk_tokens=32,
                prefix_cache=True,
                cpu_offload=True,
                eos_token_ids=(2,),
                vocab_size=100,
                seed=0,
            )
        )
        http = HttpMetrics()
        http.begin("/metrics")
        http.end("/metrics", 200, 0.1)
        stats = EngineStats(MODEL, "id", "ipc://e", LinkPeak(1.0, 1.0)).snapshot(scheduler, 1)(str)
        self.labels: defaultdict[str, defaultdict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        self.counters: set[str] = set()
        for family in text_string_to_metric_families(render(http, [("ipc://e", stats)]).decode()):
            for sample in family.samples:
                self.labels[sample.name] |= {}
                for label, value in sample.labels.items():
                    self.labels[sample.name][label].add(value)
                if family.type in ("counter", "histogram"):
                    self.counters.add(sample.name)


EXPORTED = Exported()


def problems(query: Query) -> list[str]:
    """What in the query no export can answer."""
    return [*(p for selector in query.selectors for p in selector_problems(selector)), *grouping_problems(query)]


def selector_problems(selector: Selector) -> list[str]:
    name, known = selector.metric, EXPORTED.labels
    if name not in known:
        return [f"{name} is not exported"]
    found = []
    if selector.function in ("rate", "increase", "irate") and name not in EXPORTED.counters:
        found.append(f"{selector.function} of {name}, which is no counter")
    for label, operator, value in selector.matchers:
        if label not in known[name] and label not in OF_THE_SCRAPE:
            found.append(f"{name} has no label {label}")
        elif operator == "=" and label not in OPEN_VALUES and value not in known[name][label]:
            found.append(f"{name} has no {label}={value!r}")
    return found


def grouping_problems(query: Query) -> list[str]:
    labels = OF_THE_SCRAPE.union(*(EXPORTED.labels.get(selector.metric, ()) for selector in query.selectors))
    return [f"no metric here has the label {label}" for label in query.grouping if label not in labels]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_expression_asks_for_what_is_exported(expression: str) -> None:
    query = Query(expression)
    assert query.selectors and not problems(query)


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("sum(rate(vllm:no_such_total[5m]))", "vllm:no_such_total is not exported"),
        ("sum by (tier) (rate(vllm:prompt_tokens_total[5m]))", "no metric here has the label tier"),
        ("coldblock_kv_blocks{tier='gpu', state='lost'} > 1", "coldblock_kv_blocks has no state='lost'"),
        ("coldblock_peers{tier=~'.*'}", "coldblock_peers has no label tier"),
        ("rate(coldblock_kv_blocks[5m])", "rate of coldblock_kv_blocks, which is no counter"),
        ("coldblock_step_seconds", "coldblock_step_seconds is not exported"),
        ("1 - (a_gauge offset 5m) / on (engine) group_left vllm:num_requests_running", "a_gauge is not exported"),
    ],
)
def test_the_check_finds_what_is_wrong(expression: str, problem: str) -> None:
    assert problems(Query(expression)) == [problem]


@pytest.mark.parametrize(("where", "target"), TARGETS)
def test_legends_name_labels_that_the_result_has(where: str, target: dict[str, str]) -> None:
    named = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
    assert named <= set(Query(target["expr"]).grouping), where


def test_the_dashboard_can_be_imported() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids) and DASHBOARD["schemaVersion"] >= 39 and DASHBOARD["uid"] == "coldblock"
    assert all(panel["datasource"]["uid"] == "${datasource}" for panel in PANELS)
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$(?!__)\{?(\w+)", json.dumps(DASHBOARD["panels"])))
    assert used == variables
    for query in VARIABLES:
        metric, label = re.fullmatch(r"label_values\(([\w:]+)(?:\{.*\})?, (\w+)\)", query).groups()  # type: ignore[union-attr]
        assert label in EXPORTED.labels[metric]


def test_the_dashboard_shows_every_metric_of_the_engine_but_few() -> None:
    """Who adds a metric adds it to a panel, or here."""
    shown = {selector.metric for expression in EXPRESSIONS for selector in Query(expression).selectors}
    hidden = {name for name in EXPORTED.labels if not name.endswith(("_sum", "_count"))} - shown
    assert hidden == {
        "coldblock_kv_cpu_offload_blocks_total",  # the same in bytes is
        "coldblock_kv_cpu_reload_blocks_total",
        "coldblock_max_swapped_requests",
        "coldblock_peers",
        "vllm:cache_config_info",
    }


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_says_what_happened_and_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert rule["annotations"]["summary"] and rule["annotations"]["description"].endswith(".")
    named = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
    query = Query(rule["expr"])
    plain = set.intersection(*(set(EXPORTED.labels[selector.metric]) for selector in query.selectors))
    assert named <= (set(query.grouping) if " by (" in rule["expr"] else plain)
    page = (FOLDER.parent / "operations.md").read_text(encoding="utf-8")
    assert f"`{rule['alert']}`" in page, "docs/operations.md explains each alert"

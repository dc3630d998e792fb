"""/metrics is always valid Prometheus text: HTTP numbers, the engines' own metrics, and whether they answer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from coldblock.frontend.metrics import HttpMetrics, render
from coldblock.protocol.messages import Metric, Sample, Stats
from frontend_kit import fake_engine, serving
from prometheus_client.parser import text_string_to_metric_families

LABELS = {"model_name": "tiny", "engine": "0"}


def stats(*metrics: Metric) -> Stats:
    return msgspec.structs.replace(fake_engine(Path("/nowhere")).stats(), metrics=metrics)


def values(text: bytes | str) -> dict[str, float]:
    """Sample name with sorted labels -> value."""
    text = text.decode() if isinstance(text, bytes) else text
    return {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def names(text: bytes) -> Sequence[str]:
    return [family.name for family in text_string_to_metric_families(text.decode())]


def test_all_kinds_of_engine_metrics() -> None:
    found = values(
        render(
            HttpMetrics(),
            [
                (
                    "ipc:///one",
                    stats(
                        Metric("coldblock_requests_swapped_total", "counter", "Swaps.", (Sample(3.0, LABELS),)),
                        Metric("vllm:num_requests_running", "gauge", "Running.", (Sample(2.0, LABELS),)),
                        Metric("s", "histogram", "Seconds.", (Sample(0, LABELS, (1, 0, 2), 9.5),), (0.1, 1.0)),
                    ),
                ),
                ("ipc:///two", None),
            ],
        )
    )
    labels = sorted(LABELS.items())
    assert found[f"coldblock_requests_swapped_total{labels}"] == 3
    assert found[f"vllm:num_requests_running{labels}"] == 2
    buckets = [found[f"s_bucket{sorted({**LABELS, 'le': le}.items())}"] for le in ("0.1", "1.0", "+Inf")]
    assert buckets == [1, 1, 3] and (found[f"s_count{labels}"], found[f"s_sum{labels}"]) == (3, 9.5)
    assert found["coldblock_engine_up[('endpoint', 'ipc:///one')]"] == 1
    assert found["coldblock_engine_up[('endpoint', 'ipc:///two')]"] == 0


def test_one_family_for_a_metric_of_two_engines() -> None:
    two = [
        (name, stats(Metric("x_total", "counter", "X.", (Sample(1.0, {"engine": name}),)))) for name in ("one", "two")
    ]
    text = render(HttpMetrics(), two)
    assert list(names(text)).count("x") == 1
    assert values(text)["x_total[('engine', 'two')]"] == 1


def test_a_metric_that_makes_no_sense_is_left_out() -> None:
    text = render(
        HttpMetrics(),
        [
            (
                "e",
                stats(
                    Metric("bad", "histogram", "Too few counts.", (Sample(0, {}, (1,), 1.0),), (0.1, 1.0)),
                    Metric("bad name", "gauge", "Not a name.", (Sample(1.0),)),
                    Metric("good", "gauge", 'With "quotes",\nlines and \\.', (Sample(1.0, {"a": 'b"\n'}),)),
                ),
            )
        ],
    )
    assert "good" in names(text) and not {"bad", "bad name"} & set(names(text))


def test_an_engine_that_another_exports_is_up_and_says_where_its_metrics_are() -> None:
    elsewhere = msgspec.structs.replace(stats(), exporter="other http://127.0.0.1:1/metrics\n# TYPE x")
    text = render(HttpMetrics(), [("ipc:///e", elsewhere)])
    assert text.splitlines()[-1] == (
        b"# The metrics of the engine at ipc:///e are exported by 'other http://127.0.0.1:1/metrics\\n# TYPE x'"
    )
    assert values(text)["coldblock_engine_up[('endpoint', 'ipc:///e')]"] == 1


def test_http_metrics_of_a_running_frontend(model_folder: Path) -> None:
    with fake_engine(model_folder) as engine, serving(engine) as server, server.http() as http:
        server.wait_for_health(200)
        http.post("/v1/completions", json={"prompt": "x", "stream": True})
        http.post("/v1/completions", json={"prompt": ""})
        for path in ("/a", "/b"):
            http.get(path)
        found = values(http.get("/metrics").text)

    def count(path: str, status: int) -> float:
        labels = sorted({"path": path, "status": str(status)}.items())
        return found[f"coldblock_http_requests_total{labels}"]

    assert count("/v1/completions", 200) == 1 and count("/v1/completions", 400) == 1
    assert count("other", 404) == 2, "a path that a client made up must not become a label"
    assert found["coldblock_http_open_requests[('path', '/v1/completions')]"] == 0
    assert found["coldblock_http_open_requests[('path', '/metrics')]"] == 1
    assert found["coldblock_requests_swapped_total[]"] == 1

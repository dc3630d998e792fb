"""The whole house with the embedded model: `coldblock serve`, HTTP clients outside, a pool too small inside."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
from browser import chromium, opened
from coldblock import Client
from playwright.sync_api import expect

QUESTION = [{"role": "user", "content": "Explain what a hash table is in two sentences."}]


@dataclass
class Served:
    """A running `coldblock serve`."""

    process: subprocess.Popen[str]
    port: int
    endpoint: str
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def serving(*flags: str, env: dict[str, str] | None = None) -> Iterator[Served]:
    """`coldblock serve smollm2-135m` until the block ends; its log is shown when it does not come up."""
    with tempfile.TemporaryDirectory(prefix="cb-") as folder:
        port, log = free_port(), Path(folder) / "log"
        endpoint, events = f"ipc://{folder}/e.sock", f"ipc://{folder}/v.sock"
        command = [sys.executable, "-m", "coldblock", "serve", "smollm2-135m", "--port", str(port)]
        command += ["--endpoint", endpoint, "--events-endpoint", events, "--threads", "1", *flags]
        with log.open("w") as output:
            environment = {**os.environ, **(env or {})}
            process = subprocess.Popen(command, stdout=output, stderr=output, text=True, env=environment)
        served = Served(process, port, endpoint, log)
        try:
            wait_for_health(served, 200)
            yield served
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(40)
            finally:
                process.kill()
                process.wait()


def wait_for_health(served: Served, status: int, seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if served.process.poll() is not None:
            break
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{served.url}/health", timeout=5).status_code == status:
                return
        time.sleep(0.1)
    raise AssertionError(f"/health did not become {status}:\n{served.log.read_text()}")


def metric(served: Served, name: str) -> float:
    """The sum of a metric's samples as /metrics shows them."""
    lines = httpx.get(f"{served.url}/metrics", timeout=10).text.splitlines()
    values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((name + "{", name + " "))]
    assert values, f"no {name} in /metrics"
    return sum(values)


def wait_until_idle(served: Served, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    with Client(served.endpoint) as client:
        client.ready()
        while time.monotonic() < deadline:
            stats = client.stats()
            if not stats.requests and stats.gpu.used == stats.gpu.in_flight == stats.cpu_offload.blocks == 0:
                return
            time.sleep(0.1)
    raise AssertionError(f"not idle: {stats.gpu} {stats.cpu_offload} {stats.requests}")


def kill_engine(served: Served) -> list[str]:
    """End the engine without a word; returns the process ids that `serve` had as children."""
    children = Path(f"/proc/{served.process.pid}/task/{served.process.pid}/children").read_text().split()
    engines = [pid for pid in children if "engine" in Path(f"/proc/{pid}/cmdline").read_text().split("\0")]
    assert len(engines) == 1
    os.kill(int(engines[0]), signal.SIGKILL)
    return children


@pytest.fixture(scope="module")
def small_pool(embedded_model: Path) -> Iterator[Served]:
    with serving("--num-gpu-blocks", "12", "--max-model-len", "512") as served:
        yield served


def test_the_demo_swaps_completes_and_leaves_nothing(embedded_model: Path) -> None:
    """What `make run` shows: both answers, each swap event, and a summary."""
    environment = {**os.environ, "COLDBLOCK_THREADS": "1", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "coldblock", "demo"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = [line.strip() for line in result.stdout.splitlines()]
    events = [" ".join(line.split(":")[0].split()[2:]) for line in lines if line[:1] in ("▼", "▲")]
    assert events == ["swapping out", "swapped out", "swapping in", "resumed"]
    assert "2/2 answers complete" in result.stdout
    assert "1 swap: " in result.stdout and "1 resume: " in result.stdout
    command_lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")]
    assert not any(b"tool-" in line and b"coldblock" in line for line in command_lines)


def test_openai_client_gets_the_same_answer_streamed_or_not(small_pool: Served) -> None:
    client = small_pool.openai()
    options = {"model": "smollm2-135m", "messages": QUESTION, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert "hash table" in text
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 24
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens == 40


def test_more_requests_than_the_pool_holds_all_complete(small_pool: Served) -> None:
    """Case 1 and 8: eight answers of 64 tokens, then n=4, on a pool of twelve blocks."""
    client = small_pool.openai()

    def ask(number: int) -> int:
        prompt = f"Story number {number}: Once upon a time"
        options = {"model": "smollm2-135m", "prompt": prompt, "max_tokens": 64, "temperature": 0}
        reply = client.completions.create(**options, extra_body={"ignore_eos": True})
        return int(reply.usage.completion_tokens)

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        assert list(threads.map(ask, range(8))) == [64] * 8
    reply = client.completions.create(
        model="smollm2-135m", prompt="The sea", n=4, max_tokens=64, seed=1, extra_body={"ignore_eos": True}
    )
    assert [choice.finish_reason for choice in reply.choices] == ["length"] * 4
    assert metric(small_pool, "coldblock_requests_swapped_total") > 0
    assert metric(small_pool, "coldblock_requests_swapped_total") == metric(
        small_pool, "coldblock_requests_resumed_total"
    )
    wait_until_idle(small_pool)


def test_a_prompt_larger_than_the_pool_is_refused_and_the_next_is_served(small_pool: Served) -> None:
    """Case 7: 12 blocks of 16 tokens hold 192 tokens, the model length allows 512."""
    client = small_pool.openai()
    with pytest.raises(openai.BadRequestError) as refusal:
        client.completions.create(model="smollm2-135m", prompt=[400] * 200, max_tokens=4)
    assert "200" in str(refusal.value) and "192" in str(refusal.value)
    reply = client.completions.create(model="smollm2-135m", prompt=[400] * 10, max_tokens=4)
    assert reply.usage.prompt_tokens == 10


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_blocks(small_pool: Served, stream: bool) -> None:
    """Case 24: with and without streaming."""
    body = {"model": "smollm2-135m", "prompt": "On and on", "max_tokens": 150, "stream": stream, "ignore_eos": True}
    before = metric(small_pool, "vllm:generation_tokens_total")
    url = f"{small_pool.url}/v1/completions"
    with contextlib.suppress(httpx.ReadTimeout), httpx.stream("POST", url, json=body, timeout=0.7) as reply:
        next(reply.iter_lines())
    wait_until_idle(small_pool, 10)
    assert metric(small_pool, "vllm:generation_tokens_total") - before < 150


def test_health_follows_the_engine_and_serving_recovers(embedded_model: Path) -> None:
    with serving("--num-gpu-blocks", "32", "--max-model-len", "256") as served:
        with Client(served.endpoint) as client:
            client.ready()
        children = kill_engine(served)
        wait_for_health(served, 503, 10)
        wait_for_health(served, 200)
        reply = served.openai().completions.create(model="smollm2-135m", prompt="Again", max_tokens=4)
        assert reply.usage.completion_tokens == 4
    for pid in children:
        assert not Path(f"/proc/{pid}").exists(), "a child outlived its supervisor"


def test_the_dashboard_shows_swaps_and_an_engine_that_comes_back(embedded_model: Path) -> None:
    """Two chats whose KV does not fit together, watched in a browser; then the engine is killed and started anew."""

    def ask(number: int) -> int:
        options = {"model": "smollm2-135m", "prompt": f"Story {number}: Once", "max_tokens": 110, "temperature": 0}
        reply = served.openai().completions.create(**options, extra_body={"ignore_eos": True})
        return int(reply.usage.completion_tokens)

    with (
        chromium() as browser,
        serving("--num-gpu-blocks", "10", "--max-model-len", "256") as served,
        opened(browser, f"{served.url}/dashboard") as page,
    ):
        status = page.locator(".engine .status")
        expect(status).to_have_text("● live")
        expect(page.locator(".engine h2")).to_have_text("smollm2-135m")
        assert "of 10 blocks taken" in page.locator(".tier").first.inner_text()
        assert "% of the link's" in page.locator(".direction").first.inner_text()
        with concurrent.futures.ThreadPoolExecutor(2) as threads:
            asked = threads.map(ask, range(2))
            expect(page.locator(".lane .segment.decode").first).to_be_visible()
            expect(page.locator(".lane .segment.swapped").first).to_be_visible(timeout=60_000)
            assert list(asked) == [110] * 2
        rows = page.locator(".requests tbody tr")
        expect(rows.locator(".state")).to_have_text(["■ ended", "■ ended"])
        swapped = rows.filter(has=page.locator(".mark.in"))
        expect(swapped.locator(".mark.out")).to_have_count(swapped.locator(".mark.in").count())
        names = swapped.first.locator(".segment").evaluate_all("nodes => nodes.map(node => node.className)")
        assert [name.split()[1] for name in names][-3:] == ["swapped", "copying", "decode"]
        expect(page.locator(".latency").first).to_contain_text("2 requests in the last 5 minutes")
        expect(page.locator("[data-part=moves]")).to_contain_text("▼ swapped out")
        kill_engine(served)
        expect(status).to_contain_text("not live: No engine answers here", timeout=20_000)
        expect(status).to_have_text("● live", timeout=90_000)
        expect(page.locator("[data-part=moves] tr").first).to_contain_text("engine restarted")
        assert ask(2) == 110
        expect(rows).to_have_count(3)


def test_a_long_temporary_path_does_not_break_the_sockets(tmp_path: Path, embedded_model: Path) -> None:
    """Case 36: an ipc path holds 107 bytes."""
    long = tmp_path / ("x" * 120)
    long.mkdir()
    command = [sys.executable, "-m", "coldblock", "engine", "--status"]
    environment = {**os.environ, "TMPDIR": str(long), "XDG_RUNTIME_DIR": ""}
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert result.returncode in (0, 3), result.stderr  # an engine of this user may be running at the default place


def test_a_busy_port_is_told_before_anything_is_loaded(embedded_model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "coldblock", "serve", "smollm2-135m", "--port", port]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode != 0
    assert port in result.stderr and "weights" not in result.stderr
    assert "Traceback" not in result.stderr

"""The engine as a process, met through the client library: what a user of the protocol sees."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgpack
import pytest
import zmq
from coldblock.protocol import kv_events
from coldblock.protocol.errors import EngineDied, RequestRefused
from coldblock.protocol.messages import SamplingParams, SwapEvent
from processes import EngineProcess, running_engine, write_tiny_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPT = list(range(10, 30))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(model: Path):  # type: ignore[no-untyped-def]
    with running_engine(model, "--load-format", "dummy", "--num-gpu-blocks", "64") as engine:
        yield engine


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def wait_until_idle(engine: EngineProcess, seconds: float = 10.0):  # type: ignore[no-untyped-def]
    """The engine's stats once nothing runs; the test fails when that does not come."""
    deadline = time.monotonic() + seconds
    with engine.client() as client:
        client.ready()
        while time.monotonic() < deadline:
            stats = client.stats()
            if not stats.requests and stats.gpu.in_flight == 0:
                return stats
            time.sleep(0.05)
    raise AssertionError(f"still busy: {stats}")


def wait_for_line(engine: EngineProcess, text: str, seconds: float = 20.0) -> None:
    """Until the engine's log holds the text."""
    deadline = time.monotonic() + seconds
    while text not in engine.log.read_text():
        assert time.monotonic() < deadline, engine.log.read_text()
        time.sleep(0.01)


def test_generates_and_reports_usage(engine: EngineProcess) -> None:
    with engine.client() as client:
        client.ready()
        first = client.submit(PROMPT, GREEDY).result()
        again = client.submit(PROMPT, GREEDY).result()
    assert len(first.token_ids) == 8
    assert first.token_ids == again.token_ids
    assert first.finished.reason == "length"
    assert (first.finished.usage.prompt_tokens, first.finished.usage.completion_tokens) == (20, 8)
    assert again.finished.usage.cached_tokens == 16  # one full block of the prompt


def test_logprobs_come_with_each_token(engine: EngineProcess) -> None:
    with engine.client() as client:
        client.ready()
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=3)
        completion = client.submit(PROMPT, params).result()
    assert completion.logprobs is not None and len(completion.logprobs) == 4
    for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True):
        assert len(logprob.top) == 3
        assert logprob.top[0] == (token, logprob.logprob)  # greedy takes the likeliest


def test_seeded_sampling_repeats_and_unseeded_differs(engine: EngineProcess) -> None:
    with engine.client() as client:
        client.ready()
        seeded = SamplingParams(temperature=1.0, max_tokens=16, seed=7, ignore_eos=True)
        free = SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True)
        results = [client.submit(PROMPT, params).result().token_ids for params in (seeded, seeded, free, free)]
    assert results[0] == results[1]
    assert results[2] != results[3]


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ([], GREEDY, "prompt"),
        ([320], GREEDY, "prompt"),
        ([5] * 1024, GREEDY, "prompt"),
        (PROMPT, SamplingParams(max_tokens=0), "max_tokens"),
        (PROMPT, SamplingParams(temperature=float("nan")), "temperature"),
        (PROMPT, SamplingParams(temperature=-1.0), "temperature"),
        (PROMPT, SamplingParams(top_p=0.0), "top_p"),
        (PROMPT, SamplingParams(min_p=1.5), "min_p"),
        (PROMPT, SamplingParams(top_k=-5), "top_k"),
        (PROMPT, SamplingParams(repetition_penalty=0.0), "repetition_penalty"),
        (PROMPT, SamplingParams(logprobs=10**6), "logprobs"),
        (PROMPT, SamplingParams(stop_token_ids=(-3,)), "stop_token_ids"),
    ],
)
def test_bad_requests_are_refused_by_field_and_cost_nothing(
    engine: EngineProcess, prompt: list[int], params: SamplingParams, field: str
) -> None:
    with engine.client() as client:
        client.ready()
        good = client.submit(PROMPT, GREEDY)
        with pytest.raises(RequestRefused) as refusal:
            client.submit(prompt, params).result()
        assert refusal.value.field == field
        assert len(good.result().token_ids) == 8


def test_max_tokens_is_clamped_to_the_room_left(engine: EngineProcess) -> None:
    with engine.client() as client:
        client.ready()
        completion = client.submit([7] * 1000, greedy(2**31)).result()
    assert completion.finished.reason == "length"
    assert len(completion.token_ids) == 64 * 16 - 1000


def test_abort_frees_the_blocks(engine: EngineProcess) -> None:
    with engine.client() as client:
        client.ready()
        generation = client.submit(PROMPT, greedy(900))
        next(iter(generation))
        generation.abort()
        completion = generation.result()
    assert completion.finished.reason == "abort"
    assert wait_until_idle(engine).gpu.used == 0


def test_a_client_that_leaves_has_its_requests_aborted(engine: EngineProcess) -> None:
    client = engine.client()
    client.connect() if hasattr(client, "connect") else None
    client.ready()
    generation = client.submit(PROMPT, greedy(900))
    next(iter(generation))
    client.close()
    stats = wait_until_idle(engine)
    assert stats.gpu.used == 0


def test_rubbish_is_answered_and_costs_others_nothing(engine: EngineProcess) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer, engine.client() as client:
        client.ready()
        running = client.submit(PROMPT, greedy(64))
        dealer.linger = 0
        dealer.connect(engine.endpoint)
        codes = []
        nonsense, ping = msgpack.packb(["nonsense", 1]), msgpack.packb(["ping", 1])
        for frames in ([b"\xc1\xc1"], [nonsense], [b""], [ping], [b"a", b"b"]):
            dealer.send_multipart(frames)
            assert dealer.poll(5000)
            codes.append(msgpack.unpackb(dealer.recv())[1])
        dealer.send(msgpack.packb(["hello", 999, "old"]))
        assert dealer.poll(5000)
        assert msgpack.unpackb(dealer.recv())[1] == "version"
        assert len(running.result().token_ids) == 64
    assert codes == ["malformed", "unknown", "malformed", "no_hello", "malformed"]


def test_status_prints_the_documented_json(engine: EngineProcess) -> None:
    command = [sys.executable, "-m", "coldblock", "engine", "--status", "--endpoint", engine.endpoint]
    status = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout)
    assert status["swapped"] == 0
    assert {"enabled", "payload_bytes", "budget_bytes", "max_swapped_requests"} <= status["cpu_offload"].keys()
    names = {metric["name"] for metric in status["metrics"]}
    own = "requests_swapped_total requests_resumed_total kv_cpu_offload_blocks_total kv_cpu_offload_bytes_total"
    own += " kv_cpu_offload_failed_total kv_cpu_offload_rejected_total kv_cpu_reload_blocks_total cpu_offload_seconds"
    own += " cpu_reload_seconds swapped_requests cpu_offload_bytes cpu_offload_budget_bytes cpu_offload_enabled"
    own += " max_swapped_requests request_stall_seconds request_inter_token_seconds step_seconds"
    own += " step_bookkeeping_seconds"
    assert {f"coldblock_{name}" for name in own.split()} <= names
    known = "num_requests_running num_requests_waiting kv_cache_usage_perc num_preemptions_total prompt_tokens_total"
    known += " generation_tokens_total prefix_cache_queries_total prefix_cache_hits_total request_success_total"
    known += " time_to_first_token_seconds inter_token_latency_seconds e2e_request_latency_seconds"
    known += " request_queue_time_seconds request_prefill_time_seconds request_decode_time_seconds cache_config_info"
    assert {f"vllm:{name}" for name in known.split()} <= names


def test_status_without_an_engine_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "coldblock", "engine", "--status", "--endpoint", f"ipc://{tmp_path}/none.sock"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 3
    assert "none.sock" in result.stderr


# ---------------------------------------------------------------- swap


def swap_pair(engine: EngineProcess, first: list[int], second: list[int], new: int):  # type: ignore[no-untyped-def]
    """The second request is submitted at the first one's first token. Both completions."""
    with engine.client() as client:
        client.ready()
        one = client.submit(first, greedy(new))
        items = iter(one)
        for item in items:
            if not isinstance(item, SwapEvent):
                break
        two = client.submit(second, greedy(new))
        second_done = two.result()
        first_done = one.result()
    return first_done, second_done


@pytest.mark.parametrize("kv_format", ["fp16", "int8", "fp8", "fp8_e5m2"])
def test_forced_swap_changes_no_token(model: Path, kv_format: str) -> None:
    flags = ("--load-format", "dummy", "--kv-cache-dtype", kv_format, "--deterministic", "--no-prefix-cache")
    flags += ("--swap-or-recompute", "swap")
    prompts = [[(7 * i + k) % 300 + 5 for i in range(33)] for k in range(10)]
    with running_engine(model, *flags, "--num-gpu-blocks", "64") as engine, engine.client() as client:
        client.ready()
        wanted = [list(client.submit(prompt, greedy(15)).result().token_ids) for prompt in prompts]
    with running_engine(model, *flags, "--num-gpu-blocks", "3") as engine:
        swapped = resumed = 0
        for k in range(0, 10, 2):
            for _ in range(5):  # on a busy machine the first may have ended before the second is there
                first, second = swap_pair(engine, prompts[k], prompts[k + 1], 15)
                if first.finished.usage.swaps:
                    break
            assert list(first.token_ids)[-14:] == wanted[k][-14:]
            assert list(second.token_ids) == wanted[k + 1]
            assert first.finished.usage.completion_tokens == second.finished.usage.completion_tokens == 15
            events = [event.phase for event in (*first.swap_events, *second.swap_events)]
            assert events == ["swapping_out", "swapped", "swapping_in", "resumed"]
            swapped += first.finished.usage.swaps
            resumed += events.count("resumed")
        stats = wait_until_idle(engine)
    assert (swapped, resumed) == (5, 5)
    assert (stats.gpu.used, stats.cpu_offload.payload_bytes) == (0, 0)
    assert stats.cpu_offload.max_swapped_requests == 1


@pytest.mark.parametrize("offload", [("--max-cpu-offload-mb", "0"), ("--no-cpu-offload",)])
def test_without_a_cpu_tier_everything_completes(model: Path, offload: tuple[str, ...]) -> None:
    flags = ("--load-format", "dummy", "--num-gpu-blocks", "4", "--no-prefix-cache", *offload)
    with running_engine(model, *flags) as engine, engine.client() as client:
        client.ready()
        generations = [client.submit([5 + k] * 17, greedy(40)) for k in range(4)]
        results = [generation.result() for generation in generations]
        assert [len(result.token_ids) for result in results] == [40] * 4
        assert all(result.finished.usage.swaps == 0 for result in results)
        counts = {metric.name: metric.samples[0].value for metric in client.stats().metrics}
    assert counts["coldblock_requests_swapped_total"] == 0
    assert counts["coldblock_kv_cpu_offload_rejected_total"] > 0


def test_kv_events_tell_what_prefix_is_where(model: Path, tmp_path: Path) -> None:
    replay_endpoint = f"ipc://{tmp_path}/r"
    flags = ("--load-format", "dummy", "--num-gpu-blocks", "8", "--kv-events", "--kv-replay-endpoint", replay_endpoint)
    context = zmq.Context()
    with running_engine(model, *flags) as engine, engine.client() as client:
        name = client.ready().name
        client.submit(list(range(10, 50)), greedy(8)).result()
        wait_for_line(engine, f"@{name} at {engine.events_endpoint}, again at {replay_endpoint}")
        replay = context.socket(zmq.DEALER)
        replay.connect(replay_endpoint)
        replay.send_multipart([b"", bytes(8)])
        assert replay.poll(10_000)
        _, topic, _, batch = replay.recv_multipart()
        assert topic.endswith(f"@{name}".encode())
        assert replay.poll(10_000) and replay.recv_multipart()[2] == kv_events.END
    context.destroy(linger=0)
    cleared, *stored = kv_events.decode(batch).events
    assert cleared == kv_events.AllBlocksCleared()
    on_gpu = [event for event in stored if isinstance(event, kv_events.BlockStored) and event.medium == "GPU"]
    assert [event.token_ids for event in on_gpu] == [list(range(10, 26)), list(range(26, 42))]
    assert on_gpu[1].parent_block_hash == on_gpu[0].block_hashes[0]


def test_stats_of_an_engine_show_its_link_and_a_requests_latencies(engine: EngineProcess) -> None:
    with engine.client() as client:
        client.ready()
        generation = client.submit(PROMPT, greedy(400))
        next(iter(generation))
        stats = client.stats()
        generation.abort()
    assert stats.link.peak_out_bytes_per_s > 1e6 and stats.link.peak_in_bytes_per_s > 1e6
    assert stats.cpu.total == stats.model.num_cpu_blocks > 0
    (row,) = stats.requests
    assert row.ttft_s is not None and 0 <= row.queue_s <= row.ttft_s <= row.age_s
    assert row.peer_name == "client" and bytes.fromhex(row.peer)


# ---------------------------------------------------------------- the end of things


def test_sigterm_lets_open_requests_finish(model: Path) -> None:
    with running_engine(model, "--load-format", "dummy", "--num-gpu-blocks", "64") as engine, engine.client() as client:
        client.ready()
        generation = client.submit(PROMPT, greedy(200))
        next(iter(generation))
        engine.process.send_signal(signal.SIGTERM)
        assert generation.result().finished.reason == "length"
        assert engine.process.wait(20) == 0


def test_a_second_signal_ends_open_requests(model: Path) -> None:
    with (
        running_engine(model, "--load-format", "dummy", "--num-gpu-blocks", "512") as engine,
        engine.client() as client,
    ):
        client.ready()
        generation = client.submit(PROMPT, greedy(2000))
        next(iter(generation))
        engine.process.send_signal(signal.SIGTERM)
        wait_for_line(engine, "shutting down: up to 10 s")
        engine.process.send_signal(signal.SIGINT)
        assert generation.result().finished.reason == "abort"
        assert engine.process.wait(20) == 0


HANGING_ENGINE = """
import ctypes, sys
from coldblock.engine_core import main, stop_signals
from coldblock.engine_core.device.cpu_executor import CpuExecutor

def hang(self, plan):
    print("the step hangs", flush=True)
    locked = ctypes.create_string_buffer(256)  # a mutex that is locked twice: a call that no signal interrupts
    while True:
        ctypes.CDLL(None).pthread_mutex_lock(locked)

CpuExecutor.begin_step = hang
main.DRAIN_S, stop_signals.STOP_S = float(sys.argv.pop(1)), 0.5
sys.exit(main.main(sys.argv[1:]))
"""


@pytest.mark.parametrize(("drain_s", "signals"), [(0.5, [signal.SIGTERM]), (600.0, [signal.SIGINT, signal.SIGTERM])])
def test_an_engine_whose_step_never_returns_ends_by_force(
    model: Path, drain_s: float, signals: list[signal.Signals]
) -> None:
    program = ("-c", HANGING_ENGINE, str(drain_s))
    flags = ("--load-format", "dummy", "--num-gpu-blocks", "64", "--device", "cpu")
    with running_engine(model, *flags, program=program) as engine, engine.client() as client:
        client.ready()
        open_request = client.submit(PROMPT, GREEDY)  # kept: one that nobody holds is aborted, perhaps before its step
        wait_for_line(engine, "the step hangs")
        for number in signals:
            engine.process.send_signal(number)
        assert engine.process.wait(20) == 1
        assert "ended by force" in engine.log.read_text()
        del open_request


def test_a_killed_engine_fails_open_requests_at_once(model: Path) -> None:
    with running_engine(model, "--load-format", "dummy", "--num-gpu-blocks", "64") as engine, engine.client() as client:
        client.ready()
        generation = client.submit(PROMPT, greedy(1000))
        next(iter(generation))
        engine.process.kill()
        with pytest.raises(EngineDied):
            generation.result()


def test_a_second_engine_on_the_same_endpoint_is_refused(engine: EngineProcess, model: Path) -> None:
    command = [sys.executable, "-m", "coldblock", "engine", str(model), "--load-format", "dummy"]
    command += ["--endpoint", engine.endpoint, "--events-endpoint", engine.events_endpoint]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert engine.endpoint in result.stderr and len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--kv-cache-dtype", "fp4"), ("--kv-cache-dtype", "fp4", "fp8_e5m2")),
        (("--block-size", "0"), ("--block-size", "0")),
        (("--max-model-len", "999999"), ("--max-model-len", "999999", "2048")),
        (("--device", "tpu"), ("--device", "tpu", "cpu")),
        (("--gpu-memory-utilization", "1.5"), ("--gpu-memory-utilization", "1.5")),
        (("--endpoint", "udp://x"), ("--endpoint", "udp://x")),
        (("--max-num-batched-tokens", "8"), ("--max-num-batched-tokens", "8")),
        (("--num-gpu-blocks", "999999999"), ("--num-gpu-blocks", "999999999", "MiB")),
        (("--max-cpu-offload-mb", "900000000"), ("--max-cpu-offload-mb", "900000000", "MiB")),
    ],
)
def test_a_wrong_value_ends_in_one_line(model: Path, flags: tuple[str, ...], named: tuple[str, ...]) -> None:
    device = () if "--device" in flags else ("--device", "cpu")
    command = [sys.executable, "-m", "coldblock", "engine", str(model), "--load-format", "dummy", *device, *flags]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1
    for word in named:
        assert word in lines[0]

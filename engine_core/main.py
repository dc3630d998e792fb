"""Run the engine-core process alone; `coldblock engine --status` prints a running engine's state as JSON.

Owns: the order of start and end: settings, sockets, model, scheduler, loop. Does not know: what these do inside.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ..logs import setup, tell
from ..protocol import messages, sockets
from ..protocol.client import AsyncClient
from ..protocol.errors import ColdblockError, EngineUnreachable
from ..settings import EXIT_FAILED, EXIT_OK, EXIT_UNREACHABLE, EXIT_USAGE, UsageError, load, models_dir
from .commands import Shutdown
from .config import EngineSettings, StatusSettings
from .control.config import max_request_blocks
from .control.scheduler import Scheduler, SchedulerConfig
from .decisions import DEFAULT_CPU_OFFLOAD_MB, MIB, describe_start
from .engine import Engine
from .errors import EngineError, SettingError
from .ipc import IpcPort
from .models.registry import ModelConfig, read_model_config
from .stats import EngineStats
from .stop_signals import stopping

if TYPE_CHECKING:
    from .device.config import ExecutorConfig
    from .device.cpu_executor import CpuExecutor
    from .device.cuda_executor import CudaExecutor

    LoadedExecutor = CpuExecutor | CudaExecutor

log = logging.getLogger(__name__)

PROG = "coldblock engine"
DRAIN_S = 10.0  # how long open requests may go on after SIGTERM; not at all after a second one
SHAPES = Path(__file__).parent / "models" / "shapes"  # a config.json each, for --load-format dummy


def main(argv: list[str]) -> int:
    """Run until SIGTERM or SIGINT. Returns the exit code."""
    try:
        if "--status" in argv:
            summary = "Print a running engine's state as JSON."
            return print_status(load(StatusSettings, argv, prog=PROG, summary=summary))
        settings = load(EngineSettings, argv, prog=PROG, summary=__doc__.split("\n")[0])
        setup(settings.log_level, settings.log_format, "engine")
        return serve(settings)
    except (UsageError, SettingError) as error:  # both name the flag to change
        tell(PROG, str(error), level=logging.ERROR)
        return EXIT_USAGE
    except (ColdblockError, EngineError) as error:
        tell(PROG, str(error), level=logging.ERROR)
        return EXIT_FAILED


def print_status(settings: StatusSettings) -> int:
    """`Stats` of the engine at the endpoint, as one JSON object."""
    endpoint = checked_endpoint("--endpoint", settings.endpoint or sockets.default_endpoint())

    async def ask() -> messages.Stats:
        async with AsyncClient(endpoint, name="status") as client:
            await client.ready(5.0)
            return await client.stats(5.0)

    try:
        stats = asyncio.run(ask())
    except EngineUnreachable as error:
        tell(PROG, str(error), level=logging.ERROR)
        return EXIT_UNREACHABLE
    print(msgspec.json.format(msgspec.json.encode(stats), indent=2).decode())
    return EXIT_OK


def serve(settings: EngineSettings) -> int:
    """Bind first, so that a taken endpoint is known before a model is loaded; then load, then answer."""
    started = time.monotonic()
    checkpoint = find_checkpoint(settings.model, settings.load_format)
    model_config = read_model_config(checkpoint)
    check_against_model(settings, model_config)
    endpoint = checked_endpoint("--endpoint", settings.endpoint or sockets.default_endpoint())
    events_endpoint = checked_endpoint(
        "--events-endpoint", settings.events_endpoint or sockets.default_events_endpoint()
    )
    port = IpcPort(
        endpoint,
        events_endpoint,
        peer_timeout_s=settings.peer_timeout_s,
        replay_endpoint=replay_endpoint(settings),
    )
    try:
        executor = load_executor(settings, checkpoint)
        model = describe_model(settings, checkpoint, model_config, executor)
        welcome = messages.Welcome(
            version=messages.PROTOCOL_VERSION,
            engine_id=uuid.uuid4().hex,
            model=model,
            events_endpoint=events_endpoint,
            peer_timeout_s=settings.peer_timeout_s,
        )
        stats = EngineStats(model, welcome.engine_id, endpoint, executor.link_peak)
        engine = Engine(Scheduler(scheduler_config(settings, model)), executor, port, stats)
        with stopping(lambda drain_s: port.command(Shutdown(drain_s)), DRAIN_S, lambda: end_by_force(engine)):
            port.start(welcome, stats.snapshot, lambda: time.monotonic() - engine.turned_at)
            log.info("ready after %.1f s at %s", time.monotonic() - started, endpoint)
            engine.run()
            executor.close()
    finally:
        port.close()
    return EXIT_FAILED if port.failed else EXIT_OK


def end_by_force(engine: Engine) -> None:
    """The end of an engine that was told to stop and did not: most likely a step never returns from the device."""
    text = (
        "told to stop and did not, so it is ended by force and open requests are lost: "
        f"its step loop last turned {time.monotonic() - engine.turned_at:.0f} s ago"
    )
    tell(PROG, text, level=logging.ERROR)
    os._exit(EXIT_FAILED)


def find_checkpoint(model: str, load_format: str) -> Path:
    """The folder of a model given as a path or as the name of a fetched one; for dummy weights, of a shape too."""
    folders = [Path(model).expanduser(), models_dir() / model]
    if load_format == "dummy":
        folders.append(SHAPES / model)
    for folder in folders:
        if (folder / "config.json").is_file():
            return folder.resolve()
    shapes = ", ".join(sorted(shape.name for shape in SHAPES.iterdir()))
    raise UsageError(
        f"MODEL: {model!r} is neither a folder with a config.json nor a fetched model in {models_dir()}; "
        f"`coldblock fetch-model --help` lists the names it knows; with --load-format dummy, {shapes} will do too"
    )


def replay_endpoint(settings: EngineSettings) -> str | None:
    """Where KV events are told again, if they are told at all."""
    if not settings.kv_events:
        return None
    return checked_endpoint("--kv-replay-endpoint", settings.kv_replay_endpoint or sockets.default_replay_endpoint())


def checked_endpoint(flag: str, endpoint: str) -> str:
    """The endpoint, refused by its flag when no engine can be bound to it."""
    try:
        sockets.check_endpoint(endpoint, sockets.CurveKeys.from_environment())
    except ColdblockError as error:
        raise UsageError(f"{flag}: {error}") from error
    return endpoint


def check_against_model(settings: EngineSettings, model: ModelConfig) -> None:
    """Refuse what the model cannot do, before anything is loaded."""
    if settings.max_model_len is not None and settings.max_model_len > model.max_position_embeddings:
        raise UsageError(
            f"--max-model-len: {settings.max_model_len} is not allowed: "
            f"the model was made for at most {model.max_position_embeddings} tokens"
        )


def load_executor(settings: EngineSettings, checkpoint: Path) -> LoadedExecutor:
    """The executor with the model loaded. Imports torch, so it comes after everything that can refuse without."""
    from .device.cuda_support import why_no_cuda

    config = executor_config(settings, checkpoint)
    reason = None if settings.device == "cpu" else why_no_cuda()
    executor: LoadedExecutor
    if settings.device == "cuda" and reason is not None:
        raise UsageError(f"--device: 'cuda' is not allowed: {reason}; use --device cpu")
    if settings.device == "cpu" or reason is not None:
        from .device.cpu_executor import CpuExecutor

        executor = CpuExecutor(config)
    else:
        from .device.cuda_executor import CudaExecutor

        executor = CudaExecutor(config)
    max_model_len = settings.max_model_len or executor.model_config.max_position_embeddings
    line, fields = describe_start(settings, executor.describe(), max_model_len, reason)
    log.info("%s", line, extra={"fields": fields})
    return executor


def executor_config(settings: EngineSettings, checkpoint: Path) -> ExecutorConfig:
    """The executor's frozen view of the settings."""
    from .device.config import ExecutorConfig

    return ExecutorConfig(
        model_path=checkpoint,
        kv_cache_dtype=settings.kv_cache_dtype,
        block_size=settings.block_size,
        num_gpu_blocks=settings.num_gpu_blocks,
        max_model_len=settings.max_model_len,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        cpu_offload_bytes=_cpu_offload_bytes(settings),
        load_format=settings.load_format,
        compute_dtype=settings.dtype,
        deterministic=settings.deterministic,
        allow_oversize=settings.allow_oversize,
        seed=settings.seed,
        num_threads=settings.threads,
    )


def _cpu_offload_bytes(settings: EngineSettings) -> int:
    """What was asked for; else what a small machine can spare too."""
    from .device.memory import available_memory

    if not settings.cpu_offload:
        return 0
    if settings.max_cpu_offload_mb is not None:
        return settings.max_cpu_offload_mb * MIB
    return min(DEFAULT_CPU_OFFLOAD_MB * MIB, available_memory() // 4)


def describe_model(
    settings: EngineSettings, checkpoint: Path, model: ModelConfig, executor: LoadedExecutor
) -> messages.ModelInfo:
    """What peers are told of the model and the pool."""
    max_model_len = settings.max_model_len or model.max_position_embeddings
    capacity = executor.capacity
    blocks = max_request_blocks(
        capacity.num_gpu_blocks, capacity.num_cpu_blocks if settings.cpu_offload else 0, settings.allow_oversize
    )
    return messages.ModelInfo(
        name=settings.model,
        path=str(checkpoint),
        vocab_size=model.vocab_size,
        max_model_len=max_model_len,
        max_request_tokens=min(max_model_len, blocks * settings.block_size),
        eos_token_ids=model.eos_token_ids,
        device="cuda" if "gpu" in executor.describe() else "cpu",
        kv_cache_dtype=executor.kv_format,
        kv_block_bytes=capacity.block_bytes,
        block_size=settings.block_size,
        num_gpu_blocks=capacity.num_gpu_blocks,
        num_cpu_blocks=capacity.num_cpu_blocks,
    )


def scheduler_config(settings: EngineSettings, model: messages.ModelInfo) -> SchedulerConfig:
    """The scheduler's frozen view of settings and capacity."""
    return SchedulerConfig(
        block_size=model.block_size,
        num_gpu_blocks=model.num_gpu_blocks,
        num_cpu_blocks=model.num_cpu_blocks,
        block_bytes=model.kv_block_bytes,
        max_model_len=model.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        prefill_chunk_tokens=settings.prefill_chunk_tokens,
        prefix_cache=settings.prefix_cache,
        cpu_offload=settings.cpu_offload,
        eos_token_ids=model.eos_token_ids,
        vocab_size=model.vocab_size,
        seed=settings.seed,
        victim_policy=settings.victim_policy,
        resume_order=settings.resume_order,
        swap_or_recompute=settings.swap_or_recompute,
        allow_oversize=settings.allow_oversize,
        kv_events=settings.kv_events,
    )

"""What the engine decided at start, and why: one line for people, the same as fields for programs.

Owns: the wording. Does not know: how the decisions were made; it reads the settings and what the executor took.
"""

from __future__ import annotations

from collections.abc import Mapping

from .config import EngineSettings

GIB, MIB = 2**30, 2**20
DEFAULT_CPU_OFFLOAD_MB = 2048
_PARTS = ("weights", "workspace", "graphs", "reserve", "kv")  # of `Executor.describe`, in the order of the sum

Sizes = Mapping[str, str | int]


def describe_start(
    settings: EngineSettings, sizes: Sizes, max_model_len: int, why_no_gpu: str | None
) -> tuple[str, dict[str, object]]:
    """The line and the fields. `sizes`: what the executor describes; `why_no_gpu`: if one was wanted and not taken."""
    tokens = int(sizes["kv_blocks"]) * settings.block_size
    format_reason = "as the model computes" if settings.kv_cache_dtype == "auto" else "as asked"
    blocks_reason = _why_so_many_blocks(settings, sizes, max_model_len)
    tier_reason = _why_this_cpu_tier(settings, sizes)
    device = str(sizes.get("gpu", "the CPU"))
    details = [why_no_gpu] if why_no_gpu else []
    details += [f"threads: {sizes['threads']}"] if "threads" in sizes else []
    where = f"{device} ({'; '.join(details)})" if details else device
    line = (
        f"{settings.model} on {where}: {_memory_sum(settings, sizes)}; "
        f"KV {sizes['kv_format']} ({format_reason}): {sizes['kv_blocks']:,} blocks of {settings.block_size} tokens = "
        f"{tokens:,} tokens ({blocks_reason}); CPU tier {_cpu_tier(sizes)} ({tier_reason})"
    )
    fields = {
        **sizes,
        "model": settings.model,
        "device": device,
        "device_reason": why_no_gpu,
        "block_size": settings.block_size,
        "kv_tokens": tokens,
        "kv_format_reason": format_reason,
        "kv_blocks_reason": blocks_reason,
        "cpu_tier_reason": tier_reason,
    }
    return line, fields


def _memory_sum(settings: EngineSettings, sizes: Sizes) -> str:
    """`weights 1.9 + workspace 0.3 + KV 1.2 GiB`, and of how much where that was the limit."""
    taken = {part: int(sizes[f"{part}_bytes"]) for part in _PARTS if f"{part}_bytes" in sizes}
    unit, name = (GIB, "GiB") if sum(taken.values()) >= GIB else (MIB, "MiB")
    terms = " + ".join(f"{part.replace('kv', 'KV')} {size / unit:,.1f}" for part, size in taken.items())
    if "free_bytes" not in sizes:
        return f"{terms} {name}"
    return f"{terms} {name} of {settings.gpu_memory_utilization:.0%} of {int(sizes['free_bytes']) / unit:,.1f} free"


def _why_so_many_blocks(settings: EngineSettings, sizes: Sizes, max_model_len: int) -> str:
    if settings.num_gpu_blocks is not None:
        return "as asked"
    if sizes["kv_blocks"] == settings.max_num_seqs * -(-max_model_len // settings.block_size):
        return f"all that {settings.max_num_seqs} requests of {max_model_len:,} tokens can use"
    return "what fits" if "gpu" in sizes else "what fits, at most 4 GiB"


def _cpu_tier(sizes: Sizes) -> str:
    size = int(sizes["cpu_tier_bytes"])
    if not size:
        return "off"
    amount = f"{size / GIB:,.1f} GiB" if size >= GIB else f"{size / MIB:,.1f} MiB"
    return f"{amount} = {sizes['cpu_tier_blocks']:,} blocks"


def _why_this_cpu_tier(settings: EngineSettings, sizes: Sizes) -> str:
    if not settings.cpu_offload:
        return "--no-cpu-offload"
    if settings.max_cpu_offload_mb is not None:
        return "as asked"
    block_bytes = int(sizes["kv_bytes"]) // int(sizes["kv_blocks"])
    whole = int(sizes["cpu_tier_bytes"]) + block_bytes > DEFAULT_CPU_OFFLOAD_MB * MIB
    return "the default" if whole else "a quarter of the free RAM"

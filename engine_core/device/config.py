"""What an executor must know before it loads a model.

Owns: `ExecutorConfig`. Does not know: where the values came from, or what a device makes of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True)
class ExecutorConfig:
    """Settings of one executor.

    `num_gpu_blocks` None sizes the pool from free memory. `cpu_offload_bytes` 0 switches the CPU tier off.
    `load_format` "dummy" makes seeded random weights of the shape that config.json gives. `compute_dtype` "auto" is
    the checkpoint's own; on the CPU bf16 for four-bit checkpoints, on a GPU bf16 for fp32 ones. `deterministic`: a
    request's tokens do not depend on what else runs. `allow_oversize`: chunks may have cold blocks.
    `num_threads` None leaves the thread count as it is.
    """

    model_path: Path
    kv_cache_dtype: str = "auto"
    block_size: int = 16
    num_gpu_blocks: int | None = None
    max_model_len: int | None = None
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 64
    gpu_memory_utilization: float = 0.9
    cpu_offload_bytes: int = 0
    load_format: Literal["auto", "dummy"] = "auto"
    compute_dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    deterministic: bool = False
    allow_oversize: bool = False
    seed: int = 0
    num_threads: int | None = None

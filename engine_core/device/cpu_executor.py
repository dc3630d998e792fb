"""The executor on the CPU: one model, one pool, steps one after another.

Owns: the loaded model, the pool, the transfers. Does not know: requests beyond one step, scheduling, sockets.

A step is computed when it begins, so `complete_step` only polls the copies, which run beside the compute. With
`deterministic`, a token's attention and logits are computed alone, in shapes that follow from its own context; through
the linears it goes with others only where torch computes a row as if it were alone: 4-bit linears, few rows.

Cold blocks are read where they lie, as both tiers are RAM: so nothing is computed otherwise than if they were in the
pool.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from ..control.plan import NO_BLOCKS, Chunk, StepPlan, StepResult
from ..errors import MemoryBudgetError
from ..kv_layout import ComputeDtype, FormatName, paged_kv_block_bytes, resolve_kv_cache_dtype
from ..models import k_bias
from ..models.layers import Decoder
from ..models.registry import ModelConfig, read_model_config
from ..models.w4a16 import W4Linear
from ..models.weights import Checkpoint, DummyCheckpoint, LoadOptions, load_decoder
from .batch import PagedBatch
from .config import ExecutorConfig
from .executor import IDLE_COPY_WAIT_S, Capacity
from .kv_pool import KVPool
from .link import measure_link
from .memory import available_memory
from .sampler import Sampler
from .transfer import Transfers

logger = logging.getLogger(__name__)

_MOST_POOL_BYTES = 4 << 30
_INDEPENDENT_ROWS = 8  # few enough that torch's elementwise operators meet each row in the same kind of loop
_INDEPENDENT_ELEMENTS = 32768  # and that they do not divide a matrix between threads


class CpuExecutor:
    """See `executor.Executor`. Raises CheckpointError, MemoryBudgetError and ValueError (KV dtype) at construction."""

    steps_ahead = 0

    def __init__(self, config: ExecutorConfig) -> None:
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        self._config = config
        self.model_config = read_model_config(config.model_path)
        compute = _compute_dtype(config, self.model_config)
        self.kv_format = resolve_kv_cache_dtype(config.kv_cache_dtype, compute)
        self._max_len = config.max_model_len or self.model_config.max_position_embeddings
        block_bytes = paged_kv_block_bytes(self.model_config.kv_shape, config.block_size, self.kv_format)
        with torch.inference_mode():
            with _explained():
                self._model = self._load(compute)
            if problem := self.misfit(self.kv_format):
                logger.warning("%s", problem)
            self.capacity = self._size(block_bytes)
            self._pool = KVPool(
                self.model_config.kv_shape,
                config.block_size,
                self.kv_format,
                self.capacity.num_gpu_blocks,
                self.capacity.num_cpu_blocks,
            )
        self._rows = _rows_a_pass(self._model) if config.deterministic else 0
        self._transfers = Transfers(self._pool)
        self.link_peak = measure_link(self._transfers, self.capacity)
        self._sampler = Sampler(self.model_config.tokenizer_vocab_size)
        self._result: StepResult | None = None
        self._computed = False  # whether the last step had chunks

    @torch.inference_mode()
    def begin_step(self, plan: StepPlan) -> None:
        """Begin the plan's copies, then run its chunks."""
        begun = time.perf_counter()
        self._transfers.begin(plan.moves)
        sampled, logits = self._forward([self._with_cold(chunk) for chunk in plan.chunks])
        tokens, failed = self._sampler.sample(sampled, logits)
        self._result = StepResult(plan.step, tokens, failed, (), time.perf_counter() - begun)
        self._computed = bool(plan.chunks)

    @torch.inference_mode()
    def complete_step(self) -> StepResult:
        """The step's tokens, and the copies that ended since the last call."""
        result, self._result = self._result, None
        if result is None:
            raise RuntimeError("complete_step without begin_step")
        return replace(result, moves_done=self._transfers.poll(0.0 if self._computed else IDLE_COPY_WAIT_S))

    def close(self) -> None:
        """End the thread that copies; nothing else is held beyond memory."""
        self._transfers.close()

    def misfit(self, kv_format: FormatName) -> str | None:
        """Why the model does not suit a format, with numbers; None: it does."""
        return k_bias.misfit([layer.key_bias for layer in self._model.layers], kv_format)

    @torch.inference_mode()
    def score(self, chunk: Chunk, pool: KVPool | None = None) -> Tensor:
        """Logits fp32 [T, vocab_size] after every token of a chunk, run as in a step; for evaluations.

        Its K and V go into `pool` if one is given, so that one model can be held against itself in several formats.
        """
        batch = PagedBatch(pool or self._pool, [chunk], alone=self._config.deterministic)
        return self._model.logits(self._model.forward(batch.token_ids, batch.positions, batch.attend))

    def describe(self) -> dict[str, str | int]:
        """What was loaded and the memory it takes, for the line at start."""
        capacity, block = self.capacity, self.capacity.block_bytes
        return {
            "model": self.model_config.architecture.names[0],
            "weights_bytes": self._model.nbytes(),
            "kv_format": self.kv_format,
            "kv_blocks": capacity.num_gpu_blocks,
            "kv_bytes": capacity.num_gpu_blocks * block,
            "cpu_tier_blocks": capacity.num_cpu_blocks,
            "cpu_tier_bytes": capacity.num_cpu_blocks * block,
            "threads": torch.get_num_threads(),
        }

    def _with_cold(self, chunk: Chunk) -> Chunk:
        """The chunk with all its blocks in one table: those of the CPU tier follow the pool's."""
        if not chunk.cold_blocks:
            return chunk
        first = len(self._pool.gpu)
        table = array("i", [first + block for block in chunk.cold_blocks]) + chunk.block_table
        return chunk._replace(block_table=table, cold_blocks=NO_BLOCKS)

    def _forward(self, chunks: Sequence[Chunk]) -> tuple[list[Chunk], Tensor]:
        """Run the chunks; the ones to be sampled, and their logits, one row each."""
        if self._config.deterministic:
            tokens = [one for chunk in chunks for one in _single_tokens(chunk)]
            passes = [self._pass(tokens[i : i + self._rows]) for i in range(0, len(tokens), self._rows)]
        else:
            passes = [self._pass(chunks)] if chunks else []
        logits = [rows for _, rows in passes if len(rows)]
        return [chunk for sampled, _ in passes for chunk in sampled], torch.cat(logits) if logits else torch.empty(0, 0)

    def _pass(self, chunks: Sequence[Chunk]) -> tuple[list[Chunk], Tensor]:
        alone = self._config.deterministic
        batch = PagedBatch(self._pool, chunks, alone=alone)
        hidden = self._model.forward(batch.token_ids, batch.positions, batch.attend)
        ends = [(chunk, row) for chunk, row in zip(batch.chunks, batch.last_rows(), strict=True) if chunk.sample]
        if not ends:
            return [], hidden[:0]
        rows = hidden[[row for _, row in ends]]
        logits = [self._model.logits(part) for part in rows.split(1 if alone else len(rows))]
        return [chunk for chunk, _ in ends], torch.cat(logits)

    def _load(self, compute: ComputeDtype) -> Decoder:
        """The model, its linears in the width that this CPU multiplies fastest."""
        config, options = self.model_config, self._config
        dtype = torch.bfloat16 if compute == "bf16" and _multiplies_bf16() else torch.float32
        dummy = options.load_format == "dummy"
        source = DummyCheckpoint(config, options.seed) if dummy else Checkpoint(config.path)
        copies = not options.deterministic and config.linear_elements * dtype.itemsize < available_memory() // 4
        load = LoadOptions(dtype, four_bit=compute != "fp32", dense_copies=copies, positions=self._max_len)
        return load_decoder(config, source, load)

    def _size(self, block_bytes: int) -> Capacity:
        """Blocks per tier. Without a count, the pool takes its share of what is free, or less where less is useful."""
        options, free = self._config, available_memory()
        cpu_bytes = options.cpu_offload_bytes
        if cpu_bytes > free:
            problem = f"{cpu_bytes >> 20} MiB of RAM wanted, {free >> 20} MiB are free"
            raise MemoryBudgetError("--max-cpu-offload-mb", problem)
        blocks = options.num_gpu_blocks
        if blocks is None:
            room = min(int((free - cpu_bytes) * options.gpu_memory_utilization), _MOST_POOL_BYTES)
            blocks = min(room // block_bytes, options.max_num_seqs * -(-self._max_len // options.block_size))
            if blocks < 1:
                raise MemoryBudgetError(
                    "--gpu-memory-utilization",
                    f"{room} bytes of {free} free bytes of RAM hold no block of {block_bytes} bytes",
                )
        elif blocks * block_bytes > free - cpu_bytes:
            raise MemoryBudgetError(
                "--num-gpu-blocks",
                f"{blocks} blocks of {block_bytes} bytes do not fit into {(free - cpu_bytes) >> 20} MiB of free RAM",
            )
        return Capacity(blocks, cpu_bytes // block_bytes, block_bytes)


@contextmanager
def _explained() -> Iterator[None]:
    """RAM that does not suffice for the model, in the engine's own error: torch has no type for it on the CPU."""
    try:
        yield
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):
            raise
        raise MemoryBudgetError("MODEL", f"the model does not fit into the free RAM: {error}") from error


def _compute_dtype(options: ExecutorConfig, model: ModelConfig) -> ComputeDtype:
    """The dtype asked for, else the checkpoint's; four-bit checkpoints compute in bf16, as the int4 operator does."""
    if options.compute_dtype != "auto":
        return options.compute_dtype
    return "bf16" if model.quantization is not None else model.dtype


def _rows_a_pass(model: Decoder) -> int:
    """Tokens that may share a deterministic pass: torch's int4 operator sums each row on its own, dense ones do not."""
    if not all(isinstance(linear, W4Linear) for linear in model.linears()):
        return 1
    config = model.config
    widest = max(2 * config.intermediate_size, (config.num_heads + 2 * config.num_kv_heads) * config.head_dim)
    return max(1, min(_INDEPENDENT_ROWS, _INDEPENDENT_ELEMENTS // widest))


def _single_tokens(chunk: Chunk) -> Iterator[Chunk]:
    """The chunk token by token; only its last one is sampled."""
    last = len(chunk.token_ids) - 1
    for i in range(len(chunk.token_ids)):
        token, sample = chunk.token_ids[i : i + 1], chunk.sample if i == last else None
        yield chunk._replace(token_ids=token, start=chunk.start + i, sample=sample)


def _multiplies_bf16() -> bool:
    """Whether the CPU has bf16 instructions; without them fp32 is faster."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())

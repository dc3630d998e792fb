"""The executor on a GPU: one model, one pool, steps queued on one stream and read back one step late.

Owns: what is loaded, how memory is shared out, which tokens of a step run in which pass. Does not know: how a pass runs
(`cuda_runner`), how tokens are drawn (`cuda_sampler`), scheduling, sockets.

Single tokens (decode) run as rows of a CUDA graph; longer chunks run together, kernel by kernel, unless the whole step
is so small that its tokens fit in as rows too. With `deterministic` every token is a row, and a pass always has the
same number of rows: then nothing that a token goes through depends on its company. Chunks with cold blocks run in
passes of their own.
"""

from __future__ import annotations

import logging
import operator
import time
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from ...kernels.errors import KernelError
from ..control.plan import Chunk, SampleSpec, StepPlan, StepResult
from ..control.sampling import Sampling
from ..errors import EngineError, MemoryBudgetError
from ..kv_layout import paged_kv_block_bytes, resolve_kv_cache_dtype
from ..models.cuda_decoder import CudaDecoder, Workspace, load_cuda_decoder
from ..models.k_bias import misfit
from ..models.registry import read_model_config
from ..models.weights import Checkpoint, DummyCheckpoint
from . import cuda_memory, cuda_support
from .block_tables import BlockTables, TableChanges
from .cold_attention import NO_COLD, ColdAttention, ColdBlocks, ColdMemory
from .config import ExecutorConfig
from .cuda_batch import IntArray, TokenArrays, buckets, token_arrays
from .cuda_runner import CudaRunner, PassMemory, RunnerSizes
from .cuda_sampler import CudaSampler, Picks, StepTokens
from .cuda_transfer import CudaTransfers
from .executor import IDLE_COPY_WAIT_S, Capacity
from .kv_pool import KVPool
from .link import measure_link
from .memory import available_memory

log = logging.getLogger(__name__)

DEVICE = "cuda"
DETERMINISTIC_ROWS = 64  # of every pass: hardly slower than fewer
LEAST_ROWS = 64  # that a pass may have
SHORT_STEP_TOKENS = 256  # a step of so few tokens runs as rows, if a pass has so many, whatever its chunks
SHORT_STEP_READS = 2048  # unless its rows would read more tokens' K and V than this for each multiprocessor
CAPTURED_AT_START = 256  # larger graphs are captured when they are first needed
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class _Pending:
    """A step that was begun: what it samples, the event behind it, when it was begun, whether it had chunks."""

    number: int
    tokens: StepTokens
    done: torch.cuda.Event
    begun: float
    computes: bool


class CudaExecutor:
    """See `executor.Executor`. Raises CheckpointError, SettingError and its MemoryBudgetError, EngineError for kernels
    that cannot be compiled, ValueError (KV dtype) at construction."""

    steps_ahead = 1

    @torch.inference_mode()
    def __init__(self, config: ExecutorConfig) -> None:
        self._config, self.model_config = config, read_model_config(config.model_path)
        compute = cuda_support.compute_dtype(config, self.model_config)
        cuda_support.refuse_unsupported(config, self.model_config)
        self._dtype = _DTYPES[compute]
        self.kv_format = resolve_kv_cache_dtype(config.kv_cache_dtype, compute)
        self._pending: deque[_Pending] = deque()
        self._sampled_before: dict[str, int] = {}
        self._completed_at = 0.0
        with _explained():
            self._multiprocessors = torch.cuda.get_device_properties(DEVICE).multi_processor_count
            self._stream = torch.cuda.Stream()
            with torch.cuda.stream(self._stream):
                self._load()

    def _load(self) -> None:
        """Everything that is no KV block first: what is left then is known."""
        config, model = self._config, self.model_config
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        sizes = self._sizes = self._decide_sizes()
        begun = cuda_memory.start()
        decoder = self._load_decoder(begun.free * config.gpu_memory_utilization)
        if problem := misfit(decoder.key_biases, self.kv_format):
            log.warning("%s", problem)
        most_tokens = max(sizes.max_tokens, sizes.max_rows)
        workspace = Workspace(model, self._dtype, most_tokens, sizes.max_rows, decoder.scratch_elements, DEVICE)
        self._sampler = CudaSampler(
            model.tokenizer_vocab_size, sizes.max_rows, sizes.max_tokens, sizes.max_seqs, DEVICE
        )
        one_block = KVPool(model.kv_shape, config.block_size, self.kv_format, 1, 0, DEVICE)
        memory = PassMemory(one_block.pages, model.num_heads, sizes, DEVICE)
        cold = None
        if config.allow_oversize:
            cold = ColdMemory(one_block.pages, model.num_heads, most_tokens, config.deterministic)
        graphs = cuda_memory.GRAPH_BYTES * len(sizes.buckets)
        self._memory = begun.now(config.gpu_memory_utilization, decoder.nbytes, graphs)
        self.capacity = self._share_out(one_block.block_bytes)
        blocks = self.capacity.num_gpu_blocks, self.capacity.num_cpu_blocks
        self._pool = KVPool(model.kv_shape, config.block_size, self.kv_format, *blocks, DEVICE)
        self._transfers = CudaTransfers(self._pool)
        self.link_peak = measure_link(self._transfers, self.capacity)
        self._tables = BlockTables(sizes.max_seqs, sizes.max_blocks)
        attention = ColdAttention(cold, self._pool) if cold is not None else None
        self._runner = CudaRunner(decoder, workspace, memory, self._pool.pages, self._sampler.memory, attention)
        self._warm_up()

    def _warm_up(self) -> None:
        """Run everything once, so that no request waits for a kernel to be compiled, loaded or captured."""
        self._runner.warm_up(CAPTURED_AT_START)
        asked = Sampling(temperature=1.0, top_p=0.9, repetition_penalty=1.1, logprobs=1)
        nothing = array("i", [0])
        spec = SampleSpec(asked, seed=0, output_index=0, prompt_length=1, history=nothing)
        self.begin_step(StepPlan(0, (Chunk("", nothing, 0, nothing, spec),), ()))
        self.complete_step()

    def _decide_sizes(self) -> RunnerSizes:
        config = self._config
        max_len = config.max_model_len or self.model_config.max_position_embeddings
        rows = max(config.max_num_seqs, LEAST_ROWS)
        return RunnerSizes(
            buckets=[DETERMINISTIC_ROWS] if config.deterministic else buckets(rows),
            max_tokens=config.max_num_batched_tokens,
            max_seqs=config.max_num_seqs,
            max_blocks=-(-max_len // config.block_size),
            max_len=max_len,
            deterministic=config.deterministic,
        )

    def _load_decoder(self, memory: float) -> CudaDecoder:
        """With dense copies of packed matrices where these would take little of the memory that may be taken."""
        config, model = self._config, self.model_config
        dummy = config.load_format == "dummy"
        source = DummyCheckpoint(model, config.seed, DEVICE) if dummy else Checkpoint(model.path, DEVICE)
        block_bytes = paged_kv_block_bytes(model.kv_shape, config.block_size, self.kv_format)
        asked_for = (config.num_gpu_blocks or 0) * block_bytes
        elements = model.linear_elements + model.int8_head_elements
        copies = cuda_memory.dense_copies_fit(elements * self._dtype.itemsize, memory, asked_for)
        copies = copies and not config.deterministic  # a pass has too few rows for them
        return load_cuda_decoder(model, source, self._dtype, self._sizes.max_len, copies)

    def _share_out(self, block_bytes: int) -> Capacity:
        config, free_host = self._config, available_memory()
        if config.cpu_offload_bytes > free_host:
            problem = f"{config.cpu_offload_bytes >> 20} MiB of RAM wanted, {free_host >> 20} MiB are free"
            raise MemoryBudgetError("--max-cpu-offload-mb", problem)
        useful = self._sizes.max_seqs * self._sizes.max_blocks
        blocks = cuda_memory.num_blocks(self._memory, block_bytes, config.num_gpu_blocks, useful)
        return Capacity(blocks, config.cpu_offload_bytes // block_bytes, block_bytes)

    @torch.inference_mode()
    def begin_step(self, plan: StepPlan) -> None:
        """Queue the plan's passes, and its copies, which do not wait for these."""
        begun = time.perf_counter()
        with torch.cuda.stream(self._stream):
            self._transfers.begin(plan.moves)
            step = self._sampler.begin_step()
            if plan.chunks:
                self._run(plan.chunks, step)
            self._sampler.end_step(step)
            done = torch.cuda.Event()
            done.record()
            self._transfers.start()
        self._sampled_before = step.sources()
        self._pending.append(_Pending(plan.step, step, done, begun, bool(plan.chunks)))

    @torch.inference_mode()
    def complete_step(self) -> StepResult:
        """Wait for the oldest step; its tokens, and the copies that ended since the last call."""
        if not self._pending:
            raise RuntimeError("complete_step without begin_step")
        pending = self._pending.popleft()
        pending.done.synchronize()
        tokens, failed = pending.tokens.read()
        now = time.perf_counter()
        seconds, self._completed_at = now - max(pending.begun, self._completed_at), now
        moves = self._transfers.poll(0.0 if pending.computes or self._pending else IDLE_COPY_WAIT_S)
        return StepResult(pending.number, tokens, failed, moves, seconds)

    def close(self) -> None:
        """Wait for what is queued, and give the host's pinned memory back."""
        self._stream.synchronize()
        self._transfers.close()
        self._pool.close()

    def describe(self) -> dict[str, str | int]:
        """What was loaded and the memory it takes, for the line at start."""
        capacity, memory = self.capacity, self._memory
        return {
            "model": self.model_config.architecture.names[0],
            "gpu": torch.cuda.get_device_name(),
            "free_bytes": memory.free,
            "weights_bytes": memory.weights,
            "workspace_bytes": memory.workspace,
            "graphs_bytes": memory.graphs,
            "reserve_bytes": memory.reserve,
            "kv_format": self.kv_format,
            "kv_blocks": capacity.num_gpu_blocks,
            "kv_bytes": capacity.num_gpu_blocks * capacity.block_bytes,
            "cpu_tier_blocks": capacity.num_cpu_blocks,
            "cpu_tier_bytes": capacity.num_cpu_blocks * capacity.block_bytes,
        }

    def _run(self, chunks: Sequence[Chunk], step: StepTokens) -> None:
        """All passes of a step."""
        try:
            request_ids, _, _, block_tables, _, _, cold_blocks = zip(*chunks, strict=True)
            cold = [i for i, blocks in enumerate(cold_blocks) if blocks]
            if cold:
                block_tables = tuple(map(operator.add, cold_blocks, block_tables))
            changes = self._tables.update(request_ids, block_tables)
            together = self._together(chunks)
            if not together and not cold:
                self._run_rows(chunks, changes.rows, changes, step)
                return
            rows = sorted(set(range(len(chunks))).difference(together, cold))
            for group, run in ((rows, self._run_rows), (together, self._run_chunks), (cold, self._run_cold)):
                if group:
                    run([chunks[i] for i in group], changes.rows[group], changes, step)
                    changes = changes.part(0, 0)
        except BaseException:
            self._tables.forget()  # they may not have arrived
            raise

    def _together(self, chunks: Sequence[Chunk]) -> list[int]:
        """The chunks whose tokens attend together, the longest context first."""
        several = [i for i, chunk in enumerate(chunks) if chunk.num_tokens > 1 and not chunk.cold_blocks]
        if not several or self._config.deterministic:
            return []
        reads = sum(chunk.num_tokens * (chunk.start + chunk.num_tokens) for chunk in chunks)
        tokens, most = sum(chunk.num_tokens for chunk in chunks), min(SHORT_STEP_TOKENS, self._sizes.max_rows)
        if tokens <= most and reads <= SHORT_STEP_READS * self._multiprocessors:
            return []
        return sorted(several, key=lambda i: -(chunks[i].start + chunks[i].num_tokens))

    def _run_cold(self, chunks: Sequence[Chunk], tables: IntArray, changes: TableChanges, step: StepTokens) -> None:
        """Chunks with cold blocks, with which their block tables begin."""
        cold = dict(zip(tables.tolist(), (chunk.cold_blocks for chunk in chunks), strict=True))
        run = self._run_rows if self._config.deterministic else self._run_chunks
        run(chunks, tables, changes, step, cold)

    def _run_rows(
        self,
        chunks: Sequence[Chunk],
        tables: IntArray,
        changes: TableChanges,
        step: StepTokens,
        cold: ColdBlocks = NO_COLD,
    ) -> None:
        tokens = token_arrays(chunks, tables, self._sampled_before)
        picks = _picks(chunks, tables, tokens)
        for first in range(0, len(tokens), self._sizes.max_rows):
            part = tokens.part(first, first + self._sizes.max_rows)
            chosen = picks.part(first, first + len(part))
            parameters = self._sampler.parameters(chosen, len(part))
            result = self._runner.run_rows(part, parameters, changes, cold)
            changes = changes.part(0, 0)
            if chosen.names:
                self._sampler.sample(result, chosen, step)

    def _run_chunks(
        self,
        chunks: Sequence[Chunk],
        tables: IntArray,
        changes: TableChanges,
        step: StepTokens,
        cold: ColdBlocks = NO_COLD,
    ) -> None:
        tokens = token_arrays(chunks, tables, self._sampled_before)
        picks = _picks(chunks, tables, tokens)
        ends, picks.rows = picks.rows, np.arange(len(picks.names), dtype=np.int32)
        result = self._runner.run_chunks(tokens, ends, self._sampler.parameters(picks, len(ends)), changes, cold)
        if result is not None:
            self._sampler.sample(result, picks, step)


def _picks(chunks: Sequence[Chunk], tables: IntArray, tokens: TokenArrays) -> Picks:
    """The chunks that are sampled, each at its last token."""
    chosen = [i for i, chunk in enumerate(chunks) if chunk.sample is not None]
    names = [chunks[i].request_id for i in chosen]
    specs = [chunk.sample for chunk in chunks if chunk.sample is not None]
    return Picks(names, specs, tables[chosen].tolist(), tokens.ends[chosen])


@contextmanager
def _explained() -> Iterator[None]:
    """What goes wrong at start, in the engine's own errors."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        less = "less workspace is needed with smaller --max-num-batched-tokens, --max-num-seqs or --max-model-len"
        problem = f"the model and its workspace do not fit into the GPU's free memory; {less}: {error}"
        raise MemoryBudgetError("MODEL", problem) from error
    except torch.AcceleratorError as error:  # of the driver; even a context needs some hundred MiB
        problem = str(error).partition("\n")[0]
        raise EngineError(f"the GPU cannot be used: {problem}; `nvidia-smi` lists what else uses it") from error
    except KernelError as error:
        raise EngineError(str(error)) from error

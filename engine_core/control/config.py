"""The sizes and switches of scheduling, and how large a request may be by them.

Owns: `SchedulerConfig`. Does not know: flags, or what a size is taken from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Blocks hold `block_size` tokens and `block_bytes` bytes.

    Full blocks are copied out ahead of need while more than the share `write_behind_above` of the GPU pool is taken.
    With `allow_oversize` a request may be larger than the GPU pool: while it is, at most `window` blocks of it are on
    the GPU, and what comes before is read from the CPU tier. `kv_events`: keep a log of which prefixes are where.
    """

    block_size: int
    num_gpu_blocks: int
    num_cpu_blocks: int
    block_bytes: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    prefill_chunk_tokens: int
    prefix_cache: bool
    cpu_offload: bool
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    seed: int
    victim_policy: str = "least_recently_active"
    resume_order: str = "most_urgent"
    swap_or_recompute: str = "cheaper"
    write_behind_above: float = 0.5
    allow_oversize: bool = False
    kv_events: bool = False

    @property
    def cpu_blocks(self) -> int:
        """Blocks of the CPU tier, if it is on."""
        return self.num_cpu_blocks if self.cpu_offload else 0

    @property
    def window(self) -> int:
        """The most GPU blocks of a request that is larger than the pool."""
        return window(self.num_gpu_blocks)

    @property
    def max_request_tokens(self) -> int:
        """The most tokens, prompt and answer together, that one request can hold."""
        blocks = max_request_blocks(self.num_gpu_blocks, self.cpu_blocks, self.allow_oversize)
        return min(self.max_model_len, blocks * self.block_size)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.block_size)


def window(num_gpu_blocks: int) -> int:
    """The most GPU blocks of a request that is larger than the pool: half of them, so that others run beside it."""
    return min(num_gpu_blocks, max(2, num_gpu_blocks // 2))


def max_request_blocks(num_gpu_blocks: int, num_cpu_blocks: int, allow_oversize: bool) -> int:
    """The most blocks, in both tiers together, that one running request can hold."""
    return max(num_gpu_blocks, window(num_gpu_blocks) + num_cpu_blocks) if allow_oversize else num_gpu_blocks

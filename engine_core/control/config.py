"""The sizes and switches of scheduling. Owns: `SchedulerConfig`. Does not know: flags, or what a size is taken from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Blocks hold `block_size` tokens and `block_bytes` bytes.

    Full blocks are copied out ahead of need while more than the share `write_behind_above` of the GPU pool is taken.
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

    @property
    def max_request_tokens(self) -> int:
        """The most tokens, prompt and answer together, that one request can hold."""
        return min(self.max_model_len, self.num_gpu_blocks * self.block_size)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.block_size)

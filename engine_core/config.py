"""The engine's settings as a user gives them.

Owns: the flags of `coldblock engine` and what each allows. Does not know: torch, sockets, or what the flags lead to;
`main` turns them into the frozen configs of scheduler and executor.
"""

from __future__ import annotations

import os
from typing import ClassVar, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_settings import CliPositionalArg

from ..logs import LogFormat, LogLevel
from ..settings import FileSettings, Settings
from .kv_layout import KV_CACHE_DTYPES, resolve_kv_cache_dtype

MAX_SEED = 2**63 - 1


class EngineSettings(FileSettings):
    """Everything `coldblock engine` can be told. Each is also COLDBLOCK_<NAME>, and a key under `engine:` in a file."""

    sections: ClassVar[tuple[str, ...]] = ("engine",)

    model: CliPositionalArg[str] = Field(description="a checkpoint folder, or a known name such as smollm2-135m")
    device: Literal["auto", "cuda", "cpu"] = Field("auto", description="where the model runs")
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = Field(
        "auto", description="what activations are computed in; a CPU has fp32 for fp16, and for bf16 if it lacks that"
    )
    load_format: Literal["auto", "dummy"] = Field(
        "auto", description="dummy: seeded random weights of the shape that config.json gives"
    )
    kv_cache_dtype: str = Field("auto", description=f"how K and V are stored: {', '.join(KV_CACHE_DTYPES)}")
    block_size: int = Field(16, ge=1, le=256, description="tokens in one KV block")
    num_gpu_blocks: int | None = Field(
        None, ge=1, description="KV blocks in the pool; sized from free memory if absent"
    )
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="share of the free memory that the engine may take"
    )
    max_model_len: int | None = Field(None, ge=1, description="most tokens in a request; the model's own if absent")
    max_num_seqs: int = Field(64, ge=1, le=4096, description="most requests in one step")
    max_num_batched_tokens: int = Field(1024, ge=1, description="most tokens in one step")
    prefill_chunk_tokens: int = Field(512, ge=1, description="most prompt tokens of one request in one step")
    prefix_cache: bool = Field(True, description="reuse the KV blocks of equal prompt beginnings")
    cpu_offload: bool = Field(True, description="swap cold KV blocks to CPU memory when the pool runs out")
    max_cpu_offload_mb: int | None = Field(
        None,
        ge=0,
        description="most payload, in MiB, that the CPU tier holds; 2048, or a quarter of the free RAM, if absent",
    )
    allow_oversize: bool = Field(
        False,
        description="take requests larger than the KV pool: their oldest blocks are read from the CPU tier; slow",
    )
    victim_policy: Literal["least_recently_active", "lowest_priority", "most_blocks", "least_progress"] = Field(
        "least_recently_active", description="who is swapped out when blocks run out"
    )
    resume_order: Literal["first_swapped_first", "most_urgent", "fewest_blocks"] = Field(
        "most_urgent", description="who comes back first; urgent is who has priority and has waited long"
    )
    swap_or_recompute: Literal["cheaper", "swap", "recompute"] = Field(
        "cheaper", description="what becomes of KV without room: cheaper decides by measured speeds"
    )
    seed: int = Field(0, ge=0, le=MAX_SEED, description="seed for requests that bring none, and for dummy weights")
    deterministic: bool = Field(
        False, description="a request's tokens do not depend on what else runs, bit for bit; slower"
    )
    threads: int | None = Field(
        None,
        ge=1,
        le=os.cpu_count(),
        description="CPU threads; all cores if absent, fewer are faster on a busy machine",
    )
    endpoint: str | None = Field(None, description="where requests arrive: ipc://PATH or tcp://HOST:PORT")
    events_endpoint: str | None = Field(None, description="where stats, swap and KV events are published")
    kv_events: bool = Field(
        False, description="publish which token prefixes are in which tier, for routers; tells token ids of prompts"
    )
    kv_replay_endpoint: str | None = Field(None, description="where KV events can be asked for again")
    peer_timeout_s: float = Field(10.0, gt=0, description="a peer silent for so long has its requests aborted")
    log_level: LogLevel = Field("info", description="least severe log lines to print")
    log_format: LogFormat = Field("human", description="log lines for people, or one JSON object a line")

    @model_validator(mode="after")
    def _a_step_holds_every_sequence(self) -> EngineSettings:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"--max-num-batched-tokens: {self.max_num_batched_tokens} is not allowed: a step must hold one token "
                f"of each sequence, so at least --max-num-seqs ({self.max_num_seqs})"
            )
        return self

    @model_validator(mode="after")
    def _events_tell_of_the_prefix_cache(self) -> EngineSettings:
        if self.kv_events and not self.prefix_cache:
            raise ValueError("--kv-events: they tell what is in the prefix cache; not allowed with --no-prefix-cache")
        if self.kv_replay_endpoint is not None and not self.kv_events:
            raise ValueError(f"--kv-replay-endpoint: {self.kv_replay_endpoint} is allowed with --kv-events only")
        return self

    @field_validator("kv_cache_dtype")
    @classmethod
    def _known_format(cls, name: str) -> str:
        resolve_kv_cache_dtype(name, "bf16")
        return name


class StatusSettings(Settings):
    """`coldblock engine --status`: which engine to ask."""

    endpoint: str | None = Field(None, description="the engine's endpoint; the default one if absent")
    status: bool = Field(False, description="print the running engine's state as JSON and end")

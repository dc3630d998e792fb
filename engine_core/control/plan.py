"""What the scheduler tells the executor to do in one step, and what the executor answers.

Owns: the frozen data that crosses from `control` to `device` and back.
Does not know: tensors, sockets, or how either side works.

Blocks are named by ids: GPU block ids index the GPU pool, CPU block ids the host arena. Ids travel as `array("i")`,
which `numpy.frombuffer` reads without a copy; nobody changes one that is in a plan. What exists once a sequence and
step is a named tuple: as immutable as a frozen dataclass, and made four times as fast.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from .sampling import Sampling

NO_TOKENS: array[int] = array("i")
NO_BLOCKS: array[int] = array("i")


class Direction(Enum):
    """Which way a copy goes: OUT is GPU to CPU, IN is CPU to GPU."""

    OUT = "out"
    IN = "in"


@dataclass(frozen=True, slots=True)
class BlockMove:
    """Copy whole blocks between the tiers: `gpu_blocks[i]` <-> `cpu_blocks[i]`. A `MoveDone` of that id ends it.

    A copy begins after the work of every step that was begun before its own, which may still write the blocks it
    reads, or read the blocks it writes. Its own step and later ones need not wait for it, nor it for them: until its
    `MoveDone` has been applied no step touches the blocks it writes, nor writes the ones it reads (steps may read
    them too), and no other copy touches either. So copies may run and end in any order, also beside one another.
    """

    move_id: int
    direction: Direction
    gpu_blocks: tuple[int, ...]
    cpu_blocks: tuple[int, ...]


class SampleSpec(NamedTuple):
    """How to choose the next token after a chunk. `output_index` counts the request's output tokens before this one.

    `seed` is always set (the scheduler draws one for requests that came without): the token depends on
    (seed, output_index) and the logits alone, so that a swap or a recompute repeats nothing and skips nothing.
    `history` is prompt + output so far when a penalty is active, else None. `banned` ids get no probability
    (end tokens while fewer than min_tokens were made).
    """

    sampling: Sampling
    seed: int
    output_index: int
    prompt_length: int
    history: Sequence[int] | None = None
    banned: tuple[int, ...] = ()

    def bans(self, vocab_size: int) -> set[int]:
        """The banned ids of a vocabulary. A ban of all its tokens bans none: then any token ends the request."""
        banned = {token for token in self.banned if 0 <= token < vocab_size}
        return banned if len(banned) < vocab_size else set()


class Chunk(NamedTuple):
    """Tokens of one request to run in this step: `token_ids` sit at positions start, start+1, ...

    Their K and V are written into `block_table` (GPU block ids, in order, covering positions 0 .. start+num_tokens-1),
    which also holds what they attend to. `sample` is None for a prefill chunk that is not the prompt's last.

    `cold_blocks`: CPU block ids of what comes before, for a request that is larger than the GPU pool: then
    `block_table` begins at position len(cold_blocks) * block_size, which is at most `start`. What these hold is
    attended as well, in pieces that pass through the GPU. It has arrived there; nothing overwrites it, and no copy
    touches it but ones that read it too, before the result of the last step that reads it has been applied.

    `from_previous`: the chunk's only token is the one that the step just before this one samples for this request, and
    that step's result has not been applied yet. Then `token_ids` is empty, and the executor feeds the token itself; any
    valid id will do where that step fails, as this one's result is then dropped.
    """

    request_id: str
    token_ids: array[int]
    start: int
    block_table: array[int]
    sample: SampleSpec | None
    from_previous: bool = False
    cold_blocks: array[int] = NO_BLOCKS

    @property
    def num_tokens(self) -> int:
        """Tokens that this chunk runs."""
        return 1 if self.from_previous else len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: the copies to begin, then the chunks to run. Decode chunks (one token) come first."""

    step: int
    chunks: tuple[Chunk, ...]
    moves: tuple[BlockMove, ...]


class SampledToken(NamedTuple):
    """A chosen token. `logprob` and `top` ((token id, logprob), best first) are filled when logprobs were asked for."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class MoveDone:
    """A copy that ended. `error` None: all bytes arrived. Otherwise nothing may be assumed of the target blocks.

    `seconds`: the copy itself; `queued_s`: how long it waited before, for steps and other copies.
    """

    move_id: int
    seconds: float
    error: str | None = None
    queued_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step produced. `failed` requests (request id -> reason) got no token, e.g. their logits were not finite.

    `moves_done` may include copies that other steps began. `seconds` is the step's time in the executor, less what it
    waited there for the step before.
    """

    step: int
    tokens: dict[str, SampledToken]
    failed: dict[str, str]
    moves_done: tuple[MoveDone, ...]
    seconds: float

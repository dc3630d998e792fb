"""What a KV format does to a model's predictions: the same text through the executor's paged path in several formats.

Owns: the run over a text, and the figures. Does not know: settings, files, how they are shown.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..engine_core.control.plan import Chunk
from ..engine_core.device.cpu_executor import CpuExecutor
from ..engine_core.device.kv_pool import KVPool
from ..engine_core.errors import EngineError
from ..engine_core.kv_layout import FormatName

REFERENCE: FormatName = "fp16"
BLOCK_SIZE = 16
_CHUNK_TOKENS = 256  # of a prompt at once, so that logits in two formats take little memory
_ROWS = 64  # of logits at once in fp64
_MOST_LOSS = 700.0  # nats a token; more has a perplexity that no float holds


@dataclass(frozen=True)
class Quality:
    """One format against fp16 KV over a text; KL in nats a token."""

    kv_format: str
    perplexity: float
    mean_kl: float
    p99_kl: float
    top1_agreement: float
    bytes_per_token: float


@dataclass
class _Tally:
    """What is summed up of one format: numbers, as a small tensor that stayed would keep the memory around it from use
    for the next logits."""

    pool: KVPool
    kl: array[float] = field(default_factory=lambda: array("d"))
    agreed: int = 0
    losses: int = 0
    loss: float = 0.0

    def add(self, wanted: Tensor, got: Tensor, following: Tensor) -> None:
        """Logits [T, V] of the reference and of this format; the tokens that follow, fewer than T at a text's end."""
        self.agreed += int((wanted.argmax(-1) == got.argmax(-1)).sum())
        self.losses += len(following)
        for some, ours, after in zip(wanted.split(_ROWS), got.split(_ROWS), _padded(following, len(got)), strict=True):
            expected, found = some.double().log_softmax(-1), ours.double().log_softmax(-1)
            self.kl.extend((expected.exp() * (expected - found)).sum(-1).tolist())
            self.loss -= float(found[: len(after)].gather(1, after[:, None]).sum())

    def quality(self) -> Quality:
        """All of it as figures."""
        kl = torch.tensor(self.kl, dtype=torch.float64)
        return Quality(
            kv_format=self.pool.format_name,
            perplexity=math.exp(mean_loss) if (mean_loss := self.loss / self.losses) < _MOST_LOSS else math.inf,
            mean_kl=float(kl.mean()),
            p99_kl=float(kl.quantile(0.99)),
            top1_agreement=self.agreed / len(kl),
            bytes_per_token=self.pool.block_bytes / self.pool.block_size,
        )


def compare(
    executor: CpuExecutor, windows: Iterable[Sequence[int]], most_tokens: int, formats: Sequence[FormatName]
) -> list[Quality]:
    """The figures of fp16, then of every other format, over windows of up to `most_tokens` token ids, each a sequence
    of its own.

    Raises EngineError when there are logits that are not finite.
    """
    blocks = -(-most_tokens // BLOCK_SIZE)
    shape = executor.model_config.kv_shape
    names = dict.fromkeys([REFERENCE, *formats])
    reference, *others = [_Tally(KVPool(shape, BLOCK_SIZE, name, blocks, 0)) for name in names]
    table = array("i", torch.randperm(blocks, generator=torch.Generator().manual_seed(0)).tolist())
    for window in windows:
        for chunk in _chunks(window, table):
            end = chunk.start + len(chunk.token_ids)
            following = torch.tensor(window[chunk.start + 1 : end + 1], dtype=torch.int64)
            wanted = _logits(executor, chunk, reference.pool)
            reference.add(wanted, wanted, following)
            for tally in others:
                tally.add(wanted, _logits(executor, chunk, tally.pool), following)
    return [tally.quality() for tally in (reference, *others)]


def _logits(executor: CpuExecutor, chunk: Chunk, pool: KVPool) -> Tensor:
    """Of every position of the chunk: [T, V]. Raises EngineError when not all are finite."""
    logits = executor.score(chunk, pool)
    if not bool(torch.isfinite(logits).all()):
        raise EngineError(f"the model's output is not finite with {pool.format_name} KV: see whether its weights are")
    return logits


def _chunks(window: Sequence[int], table: array[int]) -> Iterator[Chunk]:
    """A window as a prompt in chunks, each of which reads what the ones before have stored."""
    for start in range(0, len(window), _CHUNK_TOKENS):
        yield Chunk("text", array("i", window[start : start + _CHUNK_TOKENS]), start, table, None)


def _padded(following: Tensor, count: int) -> Sequence[Tensor]:
    """The tokens that follow, split as `count` rows of logits are; the last part may be short or empty."""
    return [following[start : start + _ROWS] for start in range(0, count, _ROWS)]

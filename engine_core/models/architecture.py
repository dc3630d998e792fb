"""A decoder-only architecture as a description: which tensors a layer has and which of them carry a bias.

Owns: `Architecture`. Does not know: sizes (`registry.ModelConfig`), tensors, or how a layer is computed (`layers`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Architecture:
    """Names are as in the checkpoint; `{layer}` is the layer number. Linears in one tuple read the same input."""

    names: tuple[str, ...]
    embedding: str
    layer: str
    input_norm: str
    qkv: tuple[str, str, str]
    attention_out: str
    mlp_norm: str
    gate_up: tuple[str, str]
    down: str
    final_norm: str
    head: str
    qkv_bias: bool

"""Qwen2 and Qwen2.5: Llama with a bias on q, k and v.

Owns: the difference to Llama. Does not know: anything that computes.
"""

from __future__ import annotations

from dataclasses import replace

from .llama import LLAMA

QWEN2 = replace(LLAMA, names=("Qwen2ForCausalLM",), qkv_bias=True)

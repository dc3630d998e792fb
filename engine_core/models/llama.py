"""Llama: RMSNorm, rotary attention with grouped KV heads, SwiGLU.

Owns: the description. Does not know: anything that computes.
"""

from __future__ import annotations

from .architecture import Architecture

LLAMA = Architecture(
    names=("LlamaForCausalLM",),
    embedding="model.embed_tokens",
    layer="model.layers.{layer}.",
    input_norm="input_layernorm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    attention_out="self_attn.o_proj",
    mlp_norm="post_attention_layernorm",
    gate_up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
    final_norm="model.norm",
    head="lm_head",
    qkv_bias=False,
)

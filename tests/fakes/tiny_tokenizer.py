"""A byte-level tokenizer of 256 + 3 tokens with a chat template, in a folder as a checkpoint has it."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

TEMPLATE = (
    "{% for m in messages %}{% if m['content'] == 'refuse me' %}{{ raise_exception('not this') }}{% endif %}"
    "<s>{{ m['role'][0] }}:{{ m['content'] }}</s>{% endfor %}{% if add_generation_prompt %}<s>a:{% endif %}"
)


def write_tiny_tokenizer(folder: Path) -> Tokenizer:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja into `folder`; returns the tokenizer."""
    tokens = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(BPE({token: index for index, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in ("<s>", "</s>")])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return tokenizer

"""transformers on the same weights: the peer that `bench serve --versus-transformers` measures against.

Owns: the dequantized bf16 model in this process, and how long it takes. Does not know: the engine, or the comparison.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import ToolError

_PACKAGE_ROOT = Path(__file__).resolve().parents[2]


def require_transformers() -> None:
    """Raise ToolError, naming what to install, when the peer is not there."""
    if importlib.util.find_spec("transformers") is None:
        raise ToolError("--versus-transformers needs transformers: pip install 'coldblock[test]'")


class TransformersPeer:
    """The checkpoint's model in bf16, as transformers runs it on the CPU with all cores."""

    def __init__(self, checkpoint: Path) -> None:
        # with our root on sys.path, transformers would take kernels/ for the library of that name
        sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != _PACKAGE_ROOT]
        import torch
        import transformers

        config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
        ours = (config.pop("quantization_config", None) or {}).get("quant_method") == "coldblock"
        models: Any = transformers.AutoModelForCausalLM
        self._torch = torch
        if ours:
            shape = transformers.AutoConfig.for_model(**config)
            self._model = models.from_config(shape, dtype=torch.bfloat16)
            self._model.load_state_dict(_dequantized(checkpoint / "model.safetensors"), strict=False)
            self._model.tie_weights()
        else:
            self._model = models.from_pretrained(checkpoint, dtype=torch.bfloat16)
        self._model.eval()

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> tuple[float, float]:
        """Greedy answers to prompts of equal length as one batch; seconds to the first token and to the last."""
        torch = self._torch
        ids = torch.tensor(prompts)
        seen: list[float] = []

        def note(_ids: Any, _scores: Any, **_options: Any) -> Any:
            seen.append(time.perf_counter())
            return torch.zeros(len(prompts), dtype=torch.bool)

        began = time.perf_counter()
        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
                pad_token_id=0,
                stopping_criteria=[note],
            )
        return seen[0] - began, time.perf_counter() - began

    def prefill(self, prompt: Sequence[int]) -> float:
        """Seconds to the logits after one prompt."""
        torch = self._torch
        began = time.perf_counter()
        with torch.inference_mode():
            self._model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
        return time.perf_counter() - began


def _dequantized(path: Path) -> dict[str, Any]:
    """The checkpoint's weights in bf16: 4-bit linears and the 8-bit embedding multiplied out, the rest as it is."""
    import torch
    from safetensors.torch import load_file

    tensors = load_file(path)
    weights = {}
    for name, tensor in tensors.items():
        base, _, kind = name.rpartition(".")
        if kind == "weight" or kind == "bias":
            weights[name] = tensor.to(torch.bfloat16)
        elif kind == "qweight":
            scales = tensors[f"{base}.scales"].float().unsqueeze(-1)
            mins = tensors.get(f"{base}.mins")
            if mins is not None:
                tensor = torch.stack([tensor & 0x0F, tensor >> 4], dim=-1).flatten(1)
            groups = tensor.reshape(len(tensor), scales.shape[1], -1).float() * scales
            groups = groups if mins is None else groups + mins.float().unsqueeze(-1)
            weights[f"{base}.weight"] = groups.flatten(1).to(torch.bfloat16)
    return weights

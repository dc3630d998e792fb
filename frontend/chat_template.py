"""Chat messages to prompt text, by the model's own Jinja template in a sandbox.

Owns: loading and rendering of templates, and the limits a render must keep.
Does not know: tokenizers or requests.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .errors import invalid

MAX_RENDERED_CHARS = 32 * 2**20
MAX_RENDER_S = 10.0

Message = Mapping[str, Any]


class _Refused(TemplateError):
    """The template called `raise_exception`."""


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with the repetition operators kept from building giant values."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" or not (isinstance(left, int | float) and isinstance(right, int | float)):
            size = max((len(side) for side in (left, right) if isinstance(side, Sequence)), default=1)
            count = max((abs(side) for side in (left, right) if isinstance(side, int)), default=1)
            if size * count > MAX_RENDERED_CHARS or (operator == "**" and count > 64):
                raise SecurityError(f"the template computes a value that is too large with {operator!r}")
        return super().call_binop(context, operator, left, right)


class ChatTemplate:
    """One model's template. `special_tokens` (bos_token, eos_token, ...) are variables of every render."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._template: Template = environment.from_string(source)
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt. Raises a 400 `ApiError` when the template refuses the messages, fails, or outgrows its limits.

        `options` are the request's `chat_template_kwargs`: further variables of the template.
        """
        variables = {
            "tools": None,
            "documents": None,
            **self._special_tokens,
            **(options or {}),
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._bounded(variables)
        except _Refused as error:
            raise invalid(f"the model's chat template refuses these messages: {error}", "messages") from error
        except (
            TemplateError,
            TypeError,
            ValueError,
            ArithmeticError,
            LookupError,
            AttributeError,
            RecursionError,
        ) as error:
            reason = f"the model's chat template cannot render these messages: {type(error).__name__}: {error}"
            raise invalid(reason, "messages") from error

    def _bounded(self, variables: Mapping[str, Any]) -> str:
        deadline = time.monotonic() + MAX_RENDER_S
        pieces: list[str] = []
        size = 0
        for piece in self._template.generate(variables):
            pieces.append(piece)
            size += len(piece)
            if size > MAX_RENDERED_CHARS:
                raise invalid(f"the rendered chat is longer than {MAX_RENDERED_CHARS} characters", "messages")
            if time.monotonic() > deadline:
                raise invalid(f"the model's chat template took longer than {MAX_RENDER_S:g} s", "messages")
        return "".join(pieces)


def find_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """The template's source beside a checkpoint: chat_template.jinja, else the one in tokenizer_config.json."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = tokenizer_config.get("chat_template")
    if isinstance(found, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in found}
        found = named.get("default") or next(iter(named.values()), None)
    return found if isinstance(found, str) else None


def _raise_exception(message: str) -> NoReturn:
    raise _Refused(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As templates are trained with: without Jinja's HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

"""The request bodies of the HTTP API: which fields exist, which values are allowed, what is refused by name.

Owns: parsing and validation of bodies, and their translation to `SamplingParams`.
Does not know: tokenizers, engines, responses.

Fields that nobody here knows are ignored, because clients send many; known fields that would change the answer and are
not supported are refused. `null` means the default everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from ..protocol.messages import SamplingParams
from .errors import ApiError, invalid, not_supported

MAX_CHOICES = 128  # choices of one HTTP request: prompts times n
MAX_STOPS = 16
MAX_LOGPROBS = 20
MAX_MESSAGES = 4096
MAX_MESSAGE_ITEMS = 4 * MAX_MESSAGES  # fields and content parts of all messages: more would hold the event loop
MAX_FIELDS = 256
GREEDY_BELOW = 1e-5
DEFAULT_COMPLETION_TOKENS = 16
_INT64 = 2**63

# Field -> the values that ask for nothing beyond what is done anyway.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "prompt_logprobs": (),
    "use_beam_search": (False,),
    "skip_special_tokens": (True,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "modalities": (["text"],),
    "audio": (),
    "prompt_embeds": (),
}


def _whole(value: Any) -> Any:
    """1e6 is an integer too."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Int = Annotated[int, BeforeValidator(_whole)]
TokenIds = list[int]


class _Body(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, Mapping) else data


class StreamOptions(_Body):
    """`include_usage` adds a last chunk with the totals, `continuous_usage_stats` puts them into every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationBody(_Body):
    """What completions and chat completions have in common, with vLLM's extra sampling fields."""

    model: str | None = None
    n: Int = Field(1, ge=1, le=MAX_CHOICES)
    best_of: Int | None = None
    temperature: float = Field(1.0, ge=0.0, le=100.0)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: Int = Field(0, ge=-1, le=2**31 - 1)
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    seed: Int | None = Field(None, ge=-_INT64, lt=_INT64)
    repetition_penalty: float = Field(1.0, ge=0.01, le=10.0)
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    min_tokens: Int = Field(0, ge=0, le=2**31)
    ignore_eos: bool = False
    stop: str | list[str] = Field(default_factory=list)
    stop_token_ids: list[int] = Field(default_factory=list, max_length=64)
    include_stop_str_in_output: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: Int = Field(0, ge=-(2**31), lt=2**31)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            for name, harmless in _UNSUPPORTED.items():
                if data.get(name) is not None and data[name] not in harmless:
                    raise not_supported(name, name)
        return data

    @field_validator("stop")
    @classmethod
    def _check_stops(cls, stop: str | list[str]) -> list[str]:
        stops = [stop] if isinstance(stop, str) else stop
        if len(stops) > MAX_STOPS:
            raise ValueError(f"at most {MAX_STOPS} stop strings are allowed, not {len(stops)}")
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        return stops

    @model_validator(mode="after")
    def _check_together(self) -> GenerationBody:
        if self.best_of is not None and self.best_of != self.n:
            raise not_supported("best_of other than n", "best_of")
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options is only allowed with stream: true", "stream_options")
        if self.token_limit is not None and self.min_tokens > self.token_limit:
            raise invalid(f"min_tokens ({self.min_tokens}) exceeds max_tokens ({self.token_limit})", "min_tokens")
        return self

    @property
    def token_limit(self) -> int | None:
        """The most new tokens asked for; None means as many as fit."""
        raise ApiError(500, f"{type(self).__name__} has no token limit")

    @property
    def top_logprobs_count(self) -> int | None:
        """Alternatives to report beside each token; None for no logprobs."""
        return None

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        return list(self.stop)

    def sampling(self, *, room: int, vocab_size: int, choice: int) -> SamplingParams:
        """Parameters for one choice of `n`, with max_tokens clamped to `room` tokens. Seeds differ between choices."""
        for token_id in self.stop_token_ids:
            if not 0 <= token_id < vocab_size:
                raise invalid(f"stop_token_ids: {token_id} is not in 0..{vocab_size - 1}", "stop_token_ids")
        max_tokens = room if self.token_limit is None else min(self.token_limit, room)
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min(self.min_tokens, max_tokens),
            temperature=0.0 if self.temperature < GREEDY_BELOW else self.temperature,
            top_p=self.top_p,
            top_k=max(self.top_k, 0),
            min_p=self.min_p,
            seed=None if self.seed is None else (self.seed + choice) % _INT64,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            ignore_eos=self.ignore_eos,
            stop_token_ids=tuple(self.stop_token_ids),
            logprobs=self.top_logprobs_count,
        )


class CompletionBody(GenerationBody):
    """POST /v1/completions. `prompt` is one text, several texts, token ids, or several lists of token ids."""

    prompt: Any
    max_tokens: Int = Field(DEFAULT_COMPLETION_TOKENS, ge=0)
    echo: bool = False
    logprobs: Int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @model_validator(mode="after")
    def _check_completion(self) -> CompletionBody:
        if self.max_tokens == 0 and not self.echo:
            raise invalid("max_tokens must be at least 1 (0 is allowed with echo only)", "max_tokens")
        if self.echo and self.logprobs is not None:
            raise not_supported("logprobs of the prompt (echo together with logprobs)", "logprobs")
        return self

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens

    @property
    def top_logprobs_count(self) -> int | None:
        return self.logprobs

    def prompts(self) -> list[str | TokenIds]:
        """The prompts one by one. Raises a 400 for an empty one, a wrong type, or too many."""
        if isinstance(self.prompt, str):
            prompts: list[Any] = [self.prompt]
        elif isinstance(self.prompt, list) and self.prompt:
            prompts = [self.prompt] if isinstance(self.prompt[0], int) else self.prompt
        else:
            prompts = [self.prompt]
        if len(prompts) * self.n > MAX_CHOICES:
            raise invalid(f"{len(prompts)} prompts with n={self.n}: more than {MAX_CHOICES} choices", "prompt")
        for prompt in prompts:
            if not isinstance(prompt, str | list) or type(prompt) is not type(prompts[0]):
                raise invalid(
                    "prompt must be a text, a list of token ids, or a list of these", "prompt", "invalid_type"
                )
            if not prompt:
                raise invalid("prompt must not be empty", "prompt")
        return prompts


class Part(_Body):
    """A part of a message's content."""

    type: str
    text: str = ""


class ChatMessage(_Body):
    """One message; fields beyond these are handed to the template as they are."""

    model_config = ConfigDict(extra="allow")

    role: str = Field(min_length=1)
    content: str | list[Part] = ""

    @field_validator("content")
    @classmethod
    def _join_parts(cls, content: str | list[Part]) -> str:
        """Templates are written for one text; text parts are joined by line breaks."""
        if isinstance(content, str):
            return content
        for part in content:
            if part.type != "text":
                raise not_supported(f"message content of type {part.type!r}", "messages")
        return "\n".join(part.text for part in content)


class _ChatInput(_Body):
    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict, max_length=MAX_FIELDS)

    @model_validator(mode="before")
    @classmethod
    def _bound_messages(cls, data: Any) -> Any:
        messages = data.get("messages") if isinstance(data, Mapping) else None
        if isinstance(messages, list) and len(messages) <= MAX_MESSAGES:
            fields = [message for message in messages if isinstance(message, Mapping)]
            contents = [message.get("content") for message in fields]
            items = sum(map(len, fields)) + sum(len(content) for content in contents if isinstance(content, list))
            if items > MAX_MESSAGE_ITEMS:
                raise invalid(f"the messages have more than {MAX_MESSAGE_ITEMS} fields and parts", "messages")
        return data

    def template_messages(self) -> list[dict[str, Any]]:
        """The messages as the template sees them."""
        return [message.model_dump() for message in self.messages]


class ChatBody(_ChatInput, GenerationBody):
    """POST /v1/chat/completions."""

    max_tokens: Int | None = Field(None, ge=1)
    max_completion_tokens: Int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: Int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @model_validator(mode="after")
    def _check_chat(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("top_logprobs is only allowed with logprobs: true", "top_logprobs")
        return self

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def top_logprobs_count(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizePromptBody(_Body):
    """POST /tokenize with a text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatBody(_ChatInput):
    """POST /tokenize with messages."""

    model: str | None = None
    add_special_tokens: bool = False
    return_token_strs: bool = False


class DetokenizeBody(_Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


BodyT = TypeVar("BodyT", bound=BaseModel)


def read_json(raw: bytes) -> dict[str, Any]:
    """The body as a dict. Raises a 400 when it is no JSON object; NaN and infinities are not JSON."""
    try:
        data = msgspec.json.decode(raw)
    except msgspec.MsgspecError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from error
    if not isinstance(data, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    if len(data) > MAX_FIELDS:
        raise ApiError(400, f"the body has more than {MAX_FIELDS} fields", code="invalid_json")
    return data


def parse(body_type: type[BodyT], data: dict[str, Any]) -> BodyT:
    """A validated body. Raises a 400 that names the first field at fault."""
    try:
        return body_type.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        path = ".".join(str(part) for part in first["loc"] if not isinstance(part, int))
        param = str(first["loc"][0]) if first["loc"] else None
        code: Literal["missing_field", "invalid_value"] = (
            "missing_field" if first["type"] == "missing" else "invalid_value"
        )
        raise invalid(f"{path or 'body'}: {first['msg'].removeprefix('Value error, ')}", param, code) from error

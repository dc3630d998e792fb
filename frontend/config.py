"""Settings of `coldblock frontend`.

Owns: names, defaults and allowed values. Does not know: what is done with them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field, field_validator
from pydantic_settings import NoDecode

from ..logs import LogFormat, LogLevel
from ..protocol.errors import ColdblockError
from ..protocol.sockets import CurveKeys, check_endpoint, default_endpoint
from ..settings import FileSettings


def _split(value: Any) -> Any:
    """ "a,b" and ["a,b", "c"] name several, as an environment variable or a repeated flag gives them."""
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
        return value
    return tuple(piece.strip() for part in parts for piece in part.split(",") if piece.strip())


class FrontendSettings(FileSettings):
    """How a frontend listens, and which engines it sends requests to."""

    sections: ClassVar[tuple[str, ...]] = ("frontend",)

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    engine: Annotated[tuple[str, ...], NoDecode] = Field(
        default_factory=lambda: (default_endpoint(),),
        min_length=1,
        description="endpoint of an engine; repeat it, or separate by commas, to spread requests over several",
    )
    api_key: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="key that clients must send as a bearer token; several separated by commas; none: no check"
    )
    served_model_name: str | None = Field(
        None, min_length=1, description="the model's name in the API; default: the engine's name for it"
    )
    tokenizer: Path | None = Field(
        None, description="folder with tokenizer.json, when the engine's checkpoint folder cannot be read from here"
    )
    workers: int = Field(1, ge=1, le=64, description="processes that share the port")
    max_body_mb: int = Field(32, ge=1, le=1024, description="largest request body, in MiB")
    shutdown_timeout: int = Field(30, ge=0, description="seconds that open streams get to finish after SIGTERM")
    log_level: LogLevel = Field("info", description="least severe messages to log; debug also logs each request")
    log_format: LogFormat = Field("human", description="log lines for people, or one JSON object a line")
    log_prompts: bool = Field(False, description="log prompts and answers too; they are in no log otherwise")

    @field_validator("engine")
    @classmethod
    def _check_endpoints(cls, endpoints: tuple[str, ...]) -> tuple[str, ...]:
        try:
            for endpoint in endpoints:
                check_endpoint(endpoint, CurveKeys.from_environment())
        except ColdblockError as error:
            raise ValueError(str(error)) from error
        return endpoints

    @field_validator("tokenizer")
    @classmethod
    def _has_tokenizer(cls, folder: Path | None) -> Path | None:
        if folder is not None and not (folder / "tokenizer.json").is_file():
            raise ValueError("it must be a folder with a tokenizer.json")
        return folder

    _split_engine = field_validator("engine", mode="before")(_split)
    _split_api_key = field_validator("api_key", mode="before")(_split)

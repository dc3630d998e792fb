"""How every command reads its settings: command line over environment over file, refused in one line when wrong.

Owns: the base classes `Settings` and `FileSettings`, `load`, and the exit codes of the `coldblock` program.
Does not know: which settings any command has.

A file (`--config FILE` or `COLDBLOCK_CONFIG`) is YAML or TOML with a section a process: `engine`, `frontend`. A command
reads the sections that its settings class names and refuses keys in them that it does not know.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tomllib
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

import yaml
from pydantic import Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    CliApp,
    CliSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

EXIT_OK = 0
EXIT_FAILED = 1  # it ran and failed
EXIT_USAGE = 2  # a wrong flag, value, variable or file; nothing was started
EXIT_UNREACHABLE = 3  # no engine answers at the endpoint
EXIT_INTERRUPTED = 130  # ended by Ctrl-C

_ENV_PREFIX = "COLDBLOCK_"
_FILE_SECTIONS = ("engine", "frontend")


class UsageError(Exception):
    """A setting that cannot be used; the message is the one line a user sees."""


class Settings(BaseSettings):
    """Base of every command's settings. Subclasses declare fields."""

    model_config = SettingsConfigDict(
        env_prefix=_ENV_PREFIX,
        frozen=True,
        extra="forbid",
        populate_by_name=True,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_exit_on_error=False,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        cli_shortcuts={"max-model-len": "max-cache"},
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Order of precedence; the command line is put before all of these by `load`."""
        return init_settings, env_settings


class FileSettings(Settings):
    """Base of the settings that a file may hold too; `sections` names the parts of it that they read."""

    sections: ClassVar[tuple[str, ...]]

    config: Path | None = Field(None, description="YAML or TOML file with further settings")

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], *args: Any, **sources: PydanticBaseSettingsSource
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """A file comes after all others."""
        return *super().settings_customise_sources(settings_cls, *args, **sources), _FileSource(
            settings_cls, cls.sections
        )


class _FileSource(InitSettingsSource):
    """The sections of the config file that a settings class reads."""

    def __init__(self, settings_cls: type[BaseSettings], sections: tuple[str, ...]) -> None:
        self._sections = sections
        super().__init__(settings_cls, {})

    def __call__(self) -> dict[str, Any]:
        path = self.current_state.get("config") or os.environ.get(_ENV_PREFIX + "CONFIG")
        if not path:
            return {}
        content = _read_file(Path(path))
        values: dict[str, Any] = {}
        for section in self._sections:
            table = content.get(section) or {}
            if not isinstance(table, dict):
                raise UsageError(f"{path}: section {section!r} must be a table of settings")
            values.update({key.replace("-", "_"): value for key, value in table.items()})
        return values


def _read_file(path: Path) -> dict[str, Any]:
    """The whole file as a dict. Raises `UsageError` when it is missing, of unknown kind or malformed."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}") from error
    try:
        if path.suffix == ".toml":
            content = tomllib.loads(text)
        elif path.suffix in (".yaml", ".yml"):
            content = yaml.safe_load(text) or {}
        else:
            raise UsageError(f"--config {path}: the name must end in .toml, .yaml or .yml")
    except (tomllib.TOMLDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"--config {path}: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise UsageError(f"--config {path}: must hold sections, each a table of settings")
    for name in content:
        if name not in _FILE_SECTIONS:
            raise UsageError(f"--config {path}: no section {name!r}; settings go under {' or '.join(_FILE_SECTIONS)}")
    return content


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Help for people: no names of Python types, and no defaults that say nothing."""

    _VALUES: ClassVar[dict[str, str]] = {"int": "N", "float": "X", "str": "TEXT", "Path": "PATH"}
    _EMPTY_DEFAULT = re.compile(r" \(default(?:: (?:None|\(\)|)| factory: .*)\)$")

    def _metavar_formatter(self, action: argparse.Action, default_metavar: str) -> Any:
        if isinstance(action.metavar, str):
            inner = re.fullmatch(r"tuple\[(\w+),\.\.\.\]", action.metavar)
            word = self._VALUES.get(inner[1] if inner else action.metavar, action.metavar)
            action.metavar = f"{word},..." if inner else word
        return super()._metavar_formatter(action, default_metavar)

    def _expand_help(self, action: argparse.Action) -> str:
        text = self._EMPTY_DEFAULT.sub("", super()._expand_help(action))
        tuple_default = re.search(r" \(default: \((.*)\)\)$", text)
        return f"{text[: tuple_default.start()]} (default: {tuple_default[1]})" if tuple_default else text


T = TypeVar("T", bound=Settings)


def load(settings_type: type[T], argv: list[str], *, prog: str, summary: str) -> T:
    """Settings from command line, environment and file, in that order of precedence.

    Ends the process with `EXIT_USAGE` and one line on stderr that names flag, value and what is allowed, and with
    `EXIT_OK` after `--help`.
    """
    try:
        # A subclass carries the command's name and summary into --help without touching the shared class.
        body = {
            "__doc__": summary,
            "__module__": settings_type.__module__,
            "model_config": SettingsConfigDict(cli_prog_name=prog),
        }
        named = cast("type[T]", type(settings_type.__name__, (settings_type,), body))
        command_line = CliSettingsSource[Any](named, formatter_class=_HelpFormatter)
        return CliApp.run(named, cli_args=argv, cli_settings_source=command_line)
    except ValidationError as error:
        message = _describe(error, settings_type)
    except (SettingsError, UsageError) as error:
        message = str(error).removeprefix("error parsing CLI: ")
    print(f"{prog}: {message}", file=sys.stderr)
    raise SystemExit(EXIT_USAGE)


def flag_name(field: str) -> str:
    """The command-line flag of a settings field."""
    return "--" + field.replace("_", "-")


def _describe(error: ValidationError, settings_type: type[Settings]) -> str:
    """One line for the first wrong value: flag, value, what is allowed."""
    first = error.errors()[0]
    field = str(first["loc"][0]) if first["loc"] else ""
    if first["type"] == "extra_forbidden":
        return f"unknown setting {field!r} in the config file; see --help for the names"
    if first["type"] == "missing":
        return f"{field.upper()} is missing; see --help"
    if not field:
        return first["msg"].removeprefix("Value error, ")
    reason = first["msg"].removeprefix("Value error, ")
    return f"{flag_name(field)}: {first['input']!r} is not allowed: {reason[:1].lower()}{reason[1:]}"


def models_dir() -> Path:
    """Where fetched models live: `COLDBLOCK_MODELS_DIR`, else `coldblock/models` in the user's cache folder (XDG).

    Raises UsageError when the user has no home folder.
    """
    if named := os.environ.get(_ENV_PREFIX + "MODELS_DIR"):
        return Path(named)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "coldblock" / "models"
    except RuntimeError as error:
        raise UsageError("there is no home folder for fetched models: set COLDBLOCK_MODELS_DIR") from error

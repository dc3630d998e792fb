"""Serve a model over HTTP: supervise one engine and its frontend as child processes.

Owns: which settings go to which child, and that port, model and endpoints are sound before any child starts.
Does not know: what the settings mean, or how children are kept running (`supervisor`).
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import field_validator, model_validator
from pydantic_settings import CliSuppress, NoDecode

from ..engine_core.config import EngineSettings
from ..frontend.config import FrontendSettings
from ..logs import setup
from ..protocol.errors import ColdblockError
from ..protocol.sockets import default_endpoint, default_events_endpoint, default_replay_endpoint
from ..settings import Settings, UsageError, flag_name, load
from .children import STOP_GRACE_S, own_command, run_until_signal
from .daemons import engine_ready, free_port, frontend_ready, own_endpoints
from .endpoints import usable_endpoint
from .errors import report
from .fetch_model import resolve_model
from .supervisor import ChildSpec, supervise

PROG = "coldblock serve"
_SECRETS = ("api_key",)


class ServeSettings(EngineSettings, FrontendSettings):
    """Settings of `coldblock serve`: the engine's and the frontend's."""

    sections: ClassVar[tuple[str, ...]] = ("engine", "frontend")

    engine: CliSuppress[Annotated[tuple[str, ...], NoDecode]] = ()  # known, to be refused with the way out

    _usable_endpoints = field_validator("endpoint", "events_endpoint", "kv_replay_endpoint")(usable_endpoint)

    @model_validator(mode="after")
    def _has_its_own_engine(self) -> ServeSettings:
        if "engine" in self.model_fields_set:
            raise ValueError(
                "--engine is not allowed: serve starts its own engine; for others use `coldblock frontend --engine`"
            )
        return self


def main(argv: list[str]) -> int:
    """Run the command until a signal ends it or a child cannot be kept running."""
    settings = load(ServeSettings, argv, prog=PROG, summary=(__doc__ or "").partition("\n")[0])
    setup(settings.log_level, settings.log_format, "serve")
    try:
        port = free_port(settings.host, settings.port)
        resolve_model(settings.model)
        engine, frontend = child_specs(settings, port)
    except (ColdblockError, UsageError) as error:
        return report(PROG, error)
    return run_until_signal(lambda: supervise(engine, frontend))


def free_endpoints() -> tuple[str, str, str]:
    """The default endpoints, where `coldblock chat` and `top` look; own ones when an engine is there already."""
    endpoint = default_endpoint()
    if not _someone_listens(endpoint.removeprefix("ipc://")):
        return endpoint, default_events_endpoint(), default_replay_endpoint()
    return own_endpoints("serve")


def _someone_listens(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(path) == 0


def child_specs(settings: ServeSettings, port: int) -> tuple[ChildSpec, ChildSpec]:
    """The engine's and the frontend's specs, each with its own part of the settings."""
    own_endpoint, own_events, own_replay = free_endpoints()
    endpoint = settings.endpoint or own_endpoint
    events = settings.events_endpoint or own_events
    endpoints = {"endpoint": endpoint, "events_endpoint": events}
    if settings.kv_events:
        endpoints["kv_replay_endpoint"] = settings.kv_replay_endpoint or own_replay
    engine_flags, engine_env = hand_down(settings, EngineSettings, endpoints)
    frontend_flags, frontend_env = hand_down(settings, FrontendSettings, {"engine": (endpoint,), "port": port})

    async def describe_engine() -> str:
        model = await engine_ready(endpoint)
        return f"{model.name} on {model.device}, {model.num_gpu_blocks} KV blocks, endpoint {endpoint}"

    async def describe_frontend() -> str:
        await frontend_ready(settings.host, port)
        return f"listening on http://{settings.host}:{port}"

    engine = ChildSpec("engine", own_command("engine", settings.model, *engine_flags), describe_engine, engine_env)
    frontend = ChildSpec(
        "frontend",
        own_command("frontend", *frontend_flags),
        describe_frontend,
        frontend_env,
        grace_s=settings.shutdown_timeout + STOP_GRACE_S,
    )
    return engine, frontend


def hand_down(
    settings: Settings, part: type[Settings], overrides: Mapping[str, Any]
) -> tuple[list[str], dict[str, str]]:
    """Flags and environment that give a child its part of the settings that were set, with `overrides`.

    Secrets go by the environment, since anyone may read a process's command line.
    """
    flags: list[str] = []
    env: dict[str, str] = {}
    for name in part.model_fields:
        if name in ("model", "config") or (name not in settings.model_fields_set and name not in overrides):
            continue
        value = overrides.get(name, getattr(settings, name))
        if name in _SECRETS:
            env["COLDBLOCK_" + name.upper()] = ",".join(value)
        elif isinstance(value, bool):
            flags.append(flag_name(name) if value else flag_name("no_" + name))
        elif isinstance(value, list | tuple):
            flags += [item for entry in value for item in (flag_name(name), str(entry))]
        elif value is not None:
            flags += [flag_name(name), str(value)]
    return flags, env

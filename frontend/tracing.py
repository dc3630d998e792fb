"""Whether this frontend traces: what the standard OTEL_* variables ask for, and whether it can be met.

Owns: that decision. Does not know: spans; `spans` imports OpenTelemetry, and is imported only when tracing is on.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .spans import Tracer

_EXPORTER = "OTEL_TRACES_EXPORTER"
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_ALLOWED = {_EXPORTER: ("otlp", "none"), **dict.fromkeys(_PROTOCOLS, ("http/protobuf",))}

log = logging.getLogger("coldblock.frontend")


def tracer_from(environment: Mapping[str, str]) -> Tracer | None:
    """The tracer that was asked for; None, and one line in the log, when it cannot be had: requests go on without."""
    asked_by = next((name for name in (*_ENDPOINTS, _EXPORTER) if environment.get(name)), None)
    is_off = environment.get("OTEL_SDK_DISABLED", "").lower() == "true" or environment.get(_EXPORTER) == "none"
    if asked_by is None or is_off:
        return None
    for name, allowed in _ALLOWED.items():
        value = environment.get(name) or allowed[0]
        if value not in allowed:
            log.warning("no traces: %s: %r is not supported; allowed: %s", name, value, ", ".join(allowed))
            return None
    try:
        from .spans import Tracer
    except ImportError:
        log.warning("no traces: %s is set, but OpenTelemetry is missing: pip install 'coldblock[otel]'", asked_by)
        return None
    try:
        return Tracer.to_otlp()
    except ValueError as error:  # most values that make no sense are replaced by OpenTelemetry, some are refused
        log.warning("no traces: OpenTelemetry refuses what the OTEL_* variables say: %s", error)
        return None

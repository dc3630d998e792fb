"""The embedded model's checkpoint, for tests that need a real one.

Owns: nothing; the models cache does. A file lock inside `resolve_model` makes parallel test runs safe.
"""

from __future__ import annotations

from pathlib import Path

from coldblock.tools.fetch_model import resolve_model


def embedded_model() -> Path:
    """The checkpoint folder of smollm2-135m, fetched into the normal models cache when it is missing."""
    return resolve_model("smollm2-135m")

"""Makes the fakes importable: `from fake_engine import FakeEngine`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent / "fakes"))


@pytest.fixture(scope="session")
def embedded_model() -> Path:
    """The checkpoint folder of the embedded model, fetched into the models cache when it is missing."""
    from coldblock.tools.fetch_model import resolve_model

    return resolve_model("smollm2-135m")

"""Both kinds of executor, for the tests that go through a `Harness`."""

from __future__ import annotations

import pytest
from scheduler_harness import Harness


@pytest.fixture(params=[0, 1], ids=["in turn", "one ahead"])
def steps_ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How far every `Harness` of the test works ahead."""
    monkeypatch.setattr(Harness, "steps_ahead", request.param)
    return int(request.param)

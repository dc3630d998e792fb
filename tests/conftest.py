"""Makes the fakes importable: `from fake_engine import FakeEngine`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "fakes"))

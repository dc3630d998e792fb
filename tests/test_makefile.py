"""The Makefile's set-up: what an interrupted one left half made is made anew, and nothing is done twice."""

from __future__ import annotations

import subprocess
from pathlib import Path

MAKEFILE = Path(__file__).parents[1] / "Makefile"
WORKS = "#!/bin/sh\nexit 0\n"
PYTHON = """#!/bin/sh
test "$1" = --version && exec echo "Python 3.12.0"
test "$1 $2" = "-m venv" || exit 1
mkdir -p .venv/bin
for name in python pip; do printf '#!/bin/sh\\nexit 0\\n' > .venv/bin/$name; chmod +x .venv/bin/$name; done
"""


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def install(folder: Path) -> subprocess.CompletedProcess[str]:
    python = executable(folder / "python", PYTHON)
    command = ["make", "-C", str(folder), "-f", str(MAKEFILE), "install", f"PYTHON={python}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_environment_without_pip_is_made_anew(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    executable(tmp_path / ".venv" / "bin" / "python", WORKS)
    done = install(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Creating .venv (Python 3.12.0)" in done.stdout
    assert "Creating" not in install(tmp_path).stdout

"""The Makefile's set-up and the gate's: what was left half made is made anew, and nothing is done twice."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

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


def install(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    python = executable(folder / "python", PYTHON)
    command = ["make", "-C", str(folder), "-f", str(MAKEFILE), "install", f"PYTHON={python}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_environment_without_pip_is_made_anew(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    executable(tmp_path / ".venv" / "bin" / "python", WORKS)
    done = install(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Creating .venv (Python 3.12.0)" in done.stdout
    assert "Creating" not in install(tmp_path).stdout


def test_another_cuda_is_installed_over_the_first_and_kept(tmp_path: Path) -> None:
    """`make run` takes cuda12; whoever then asks for cuda13 gets it, and later calls do not go back."""
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    binaries, log = tmp_path / ".venv" / "bin", tmp_path / "log"
    executable(binaries / "python", WORKS)
    executable(binaries / "pip", f'#!/bin/sh\necho "$@" >>{log}\n')
    install(tmp_path)
    assert "dev,cuda12" in log.read_text()
    log.write_text("")
    install(tmp_path, "CUDA=cuda13")
    assert "uninstall --quiet --yes cupy-cuda12x" in log.read_text()
    assert "dev,cuda13" in log.read_text()
    log.write_text("")
    install(tmp_path)
    install(tmp_path, "CUDA=cuda13")
    assert log.read_text() == ""


def test_a_cuda_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    done = install(tmp_path, "CUDA=12.4")
    assert done.returncode == 2
    assert "CUDA=12.4 is not allowed: cuda12 or cuda13" in done.stderr


@pytest.mark.parametrize("has_apt", [False, True])
def test_the_gate_says_what_to_do_when_it_cannot_install_chromium(tmp_path: Path, has_apt: bool) -> None:
    """No sudo and no root, or nothing to install from: it ends before it builds anything."""
    (tmp_path / "dirname").symlink_to(shutil.which("dirname") or "")
    executable(tmp_path / "id", "#!/bin/sh\necho 1000\n")
    if has_apt:
        executable(tmp_path / "apt-get", "#!/bin/sh\nexit 0\n")
    gate = subprocess.run(
        ["/bin/bash", MAKEFILE.parent / ".ci" / "run"], env={"PATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert gate.returncode == 1
    assert gate.stderr.endswith("run 'apt-get install chromium' as root, then this again\n")


def test_the_gate_makes_the_browser_tests_fail_without_a_browser(tmp_path: Path) -> None:
    for name, text in (("chromium", WORKS), ("make", '#!/bin/sh\necho "$1 $COLDBLOCK_REQUIRE_CHROMIUM"\n')):
        executable(tmp_path / name, text)
    path = f"{tmp_path}:/usr/bin:/bin"
    gate = subprocess.run([MAKEFILE.parent / ".ci" / "run"], env={"PATH": path}, capture_output=True, text=True)
    assert gate.stdout == "lint 1\ntypecheck 1\ntest 1\n", gate.stderr

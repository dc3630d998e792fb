"""What an installed Coldblock consists of: every package, the kernels' sources, the shapes, the pages."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]


def folder_of(package: str) -> Path:
    return ROOT.joinpath(*package.split(".")[1:])


def test_every_package_is_shipped() -> None:
    shipped = {folder_of(package) for package in SETUPTOOLS["packages"]}
    rooms = [folder for folder in shipped if folder.parent == ROOT]
    assert shipped == {ROOT, *(file.parent for room in rooms for file in room.rglob("__init__.py"))}


def test_every_kernel_source_shape_and_page_is_shipped() -> None:
    patterns = SETUPTOOLS["package-data"].items()
    shipped = {file for package, globs in patterns for glob in globs for file in folder_of(package).glob(glob)}
    assert {file for file in (ROOT / "kernels" / "cuda").iterdir() if file.is_file()} <= shipped
    assert set((ROOT / "engine_core" / "models" / "shapes").rglob("*.json")) <= shipped
    assert set((ROOT / "frontend" / "dashboard" / "page").iterdir()) <= shipped
    assert set((ROOT / "tools" / "bench" / "templates").iterdir()) <= shipped


def test_a_built_wheel_has_the_page(tmp_path: Path) -> None:
    """Built from a copy: setuptools leaves a build folder in the tree."""
    tree = tmp_path / "tree"
    shutil.copytree(
        ROOT, tree, ignore=shutil.ignore_patterns(".*", "build", "docs", "tests", "*.egg-info", "__pycache__")
    )
    command = [sys.executable, "-c", "import sys, setuptools.build_meta as build; build.build_wheel(sys.argv[1])"]
    built = subprocess.run([*command, str(tmp_path)], cwd=tree, capture_output=True, text=True, timeout=240)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    page = {file.name for file in (ROOT / "frontend" / "dashboard" / "page").iterdir()}
    names = {Path(name) for name in zipfile.ZipFile(wheel).namelist()}
    assert {name.name for name in names if name.parent == Path("coldblock/frontend/dashboard/page")} == page

"""Imports run one way through the house; the frontend and the commands start without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("protocol", "kernels", "engine_core", "frontend", "tools")
SHARED = (ROOT / "settings.py", ROOT / "logs.py", ROOT / "progress.py")

# The frontend's text side: templates and token ids, without HTTP.
FRONTEND_TEXT = ("frontend/chat_template", "frontend/detokenizer", "frontend/errors", "frontend/tokenization")

# What a file may import of ours: the longest matching prefix on the left decides, prefixes on the right are allowed.
ALLOWED = {
    "protocol": ("protocol",),
    "kernels": ("kernels",),
    "settings": (),
    "logs": (),
    "progress": ("logs",),
    "engine_core/control": ("engine_core/control",),
    "engine_core/kv_layout": (),
    "engine_core/errors": (),
    "engine_core/decisions": ("engine_core/config",),
    "engine_core/commands": ("engine_core/control",),
    "engine_core/config": ("logs", "settings", "engine_core/kv_layout"),
    "engine_core/models": ("engine_core/models", "engine_core/errors", "engine_core/kv_layout", "kernels", "progress"),
    "engine_core/device": (
        "engine_core/device",
        "engine_core/models",
        "engine_core/errors",
        "engine_core/kv_layout",
        "engine_core/control/plan",
        "engine_core/control/sampling",
        "kernels",
        "progress",
    ),
    "engine_core/engine": ("engine_core/commands", "engine_core/control", "engine_core/device/executor"),
    "engine_core/exporter": (),
    "engine_core/request_ids": (),
    "engine_core/ipc": (
        "engine_core/commands",
        "engine_core/control",
        "engine_core/exporter",
        "engine_core/kv_feed",
        "engine_core/request_ids",
        "protocol",
    ),
    "engine_core/kv_feed": ("engine_core/control", "protocol"),
    "engine_core/stats": (
        "engine_core/control",
        "engine_core/device/executor",
        "engine_core/request_ids",
        "protocol",
    ),
    "engine_core/stop_signals": (),
    "engine_core/main": ("engine_core", "logs", "protocol", "settings"),
    "frontend": ("frontend", "logs", "protocol", "settings"),
    "tools": ("tools", "logs", "protocol", "settings", "progress"),
    "tools/chat": ("tools", "protocol", "settings", *FRONTEND_TEXT),
    "tools/demo": ("tools", "protocol", "settings", *FRONTEND_TEXT),
    "tools/bench/kernels": ("tools", "settings", "progress", "kernels"),
    "tools/bench/kernel_cases": ("tools", "kernels", "engine_core/kv_layout", "engine_core/models/cuda_linears"),
    "tools/gpu": ("tools", "kernels"),
    "tools/validate": ("tools", "settings", "progress", "engine_core", "kernels"),
    "tools/eval_kv": ("tools", "settings", "progress", "engine_core", "protocol/text"),
    "tools/kv_quality": (
        "engine_core/control/plan",
        "engine_core/device",
        "engine_core/errors",
        "engine_core/kv_layout",
    ),
    "tools/kernel_checks": (
        "engine_core/device",
        "engine_core/models",
        "engine_core/kv_layout",
        "kernels",
        "tools/large_bias",
    ),
    "tools/large_bias": ("kernels",),
    "tools/top/history": ("protocol", "tools/terminal"),
    "tools/top/columns": ("protocol", "tools/terminal", "tools/top/history"),
    "tools/top/panels": ("protocol", "tools/terminal", "tools/top/history", "tools/top/columns"),
    "tools/serve": ("tools", "logs", "protocol", "settings", "engine_core/config", "frontend/config"),
}
PURE_PYTHON = {"torch", "cupy", "zmq", "numpy", "msgspec", "msgpack"}


def source_files() -> list[Path]:
    return [path for part in PARTS for path in sorted((ROOT / part).rglob("*.py"))] + list(SHARED)


def imports(path: Path) -> list[str]:
    """Every module that a file imports; ours as paths from the root, e.g. "engine_core/control/plan"."""
    package = path.relative_to(ROOT).parent.parts
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level == 0:
                found.append(node.module or "")
                continue
            base = package[: len(package) - (node.level - 1)]
            stem = "/".join((*base, *(node.module or "").split("."))).strip("/")
            found += [resolve(stem, alias.name) for alias in node.names]
    return found


def resolve(stem: str, name: str) -> str:
    """`from .x import y` names a module x/y, or a thing inside module x."""
    inner = f"{stem}/{name}" if stem else name
    is_module = (ROOT / f"{inner}.py").exists() or (ROOT / inner / "__init__.py").exists()
    return inner if is_module else stem


def rule_for(path: Path) -> tuple[str, ...]:
    name = path.relative_to(ROOT).with_suffix("").as_posix()
    matching = [prefix for prefix in ALLOWED if name == prefix or name.startswith(prefix + "/")]
    return ALLOWED[max(matching, key=len)] if matching else ()


@pytest.mark.parametrize("path", source_files(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_run_one_way(path: Path) -> None:
    allowed = rule_for(path)
    for module in imports(path):
        ours = module in ("settings", "logs", "progress") or module.split("/")[0] in PARTS
        if ours and path.stem != "__init__":
            assert any(module == prefix or module.startswith(prefix + "/") for prefix in allowed), (
                f"{path.relative_to(ROOT)} imports {module}, allowed are {allowed}"
            )


@pytest.mark.parametrize("path", sorted((ROOT / "engine_core/control").glob("*.py")), ids=lambda path: path.name)
def test_control_is_pure_python(path: Path) -> None:
    assert not {module.split(".")[0] for module in imports(path)} & PURE_PYTHON


@pytest.mark.parametrize(
    "module", ["coldblock.frontend.main", "coldblock.__main__", "coldblock.engine_core.config", "coldblock.Client"]
)
def test_starts_without_torch(module: str) -> None:
    name, _, attribute = module.rpartition(".") if module.endswith("Client") else (module, "", "")
    code = f"import sys, {name} as m; getattr(m, {attribute or '__name__'!r}); print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "False"


def test_only_the_live_screen_needs_textual() -> None:
    users = {path.stem for path in source_files() if {"textual", "rich"} & {m.split(".")[0] for m in imports(path)}}
    assert users == {"app", "widgets", "main"}  # main looks whether it is there


def test_the_rule_sees_a_forbidden_import(tmp_path: Path) -> None:
    """The reader of imports must find relative ones, or the rule above proves nothing."""
    assert "engine_core/control/plan" in imports(ROOT / "engine_core/device/executor.py")
    assert "engine_core/kv_layout" in imports(ROOT / "engine_core/config.py")

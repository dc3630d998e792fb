"""docs/protocol.md: names everything there is, and its examples run."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from coldblock.protocol import errors, messages, sockets
from coldblock.protocol.codec import MAX_MESSAGE_BYTES
from coldblock.protocol.messages import Goodbye, Hello
from fake_engine import MODEL, FakeEngine
from msgspec import Struct
from msgspec.structs import fields, replace
from tokenizers import Tokenizer, decoders, models

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
STRUCTS = [s for _, s in inspect.getmembers(messages, inspect.isclass) if issubclass(s, Struct) and s is not Struct]


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda s: s.__name__)
def test_every_struct_its_tag_and_its_fields_are_on_the_page(struct: type[Struct]) -> None:
    assert f"`{struct.__name__}`" in PAGE
    tag = struct.__struct_config__.tag
    assert tag is None or f"`{tag}`" in PAGE
    missing = [f.name for f in fields(struct) if not re.search(rf"\b{f.name}\b", PAGE)]
    assert not missing


def test_every_error_limit_and_variable_is_on_the_page() -> None:
    for name, error in inspect.getmembers(errors, inspect.isclass):
        assert issubclass(error, errors.ColdblockError)
        assert f"`{name}`" in PAGE
    for code in ("version", "malformed", "unknown", "too_large", "no_hello"):
        assert f"| `{code}` |" in PAGE
    assert f"{MAX_MESSAGE_BYTES // 2**20} MiB" in PAGE
    assert f"{sockets.MAX_TRANSPORT_BYTES // 2**20} MiB" in PAGE
    assert f"{sockets.MAX_IPC_PATH_BYTES} bytes" in PAGE
    assert f"version: **{messages.PROTOCOL_VERSION}**" in PAGE
    assert sockets.SERVER_KEY_FILE in PAGE
    assert sockets.CLIENT_KEY_FILE in PAGE


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeEngine]:
    """An engine at the default endpoint, whose model has a tokenizer of three words."""
    tokenizer = Tokenizer(models.WordLevel({"Hello": 0, "there": 1, "?": 2}, unk_token="?"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="cb-") as runtime:
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        model = replace(MODEL, path=str(tmp_path))
        with FakeEngine(lambda p: [0, "swapped", 1], endpoint=sockets.default_endpoint(), model=model) as running:
            yield running


def run_example(number: int) -> str:
    code = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[number]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_with_the_client_library(engine: FakeEngine) -> None:
    assert run_example(0) == "model: fake-model\nHello[swapped: 3 blocks]\n there\nswapped requests: 0\n"


def test_the_example_with_zeromq_alone(engine: FakeEngine) -> None:
    lines = run_example(1).splitlines()
    assert lines[0] == "welcome 1 fake-model"
    assert lines[1] == "request-1 (0,)"
    assert lines[2].startswith("swap ['request-1', 'swapped'")
    assert lines[-1] == "finished: stop"
    engine.wait_for(Goodbye)
    assert engine.messages(Hello)[0].name == "raw example"

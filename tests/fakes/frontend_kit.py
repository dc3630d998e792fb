"""A tiny byte-level model, a fake engine that speaks it, and a frontend over both on a free loopback port."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import uvicorn
from coldblock.frontend.bounded_http import BoundedHttp
from coldblock.frontend.config import FrontendSettings
from coldblock.frontend.http import create_app
from coldblock.frontend.main import bind
from coldblock.frontend.server import HttpServer
from coldblock.protocol.client import AsyncClient
from fake_engine import MODEL, FakeEngine
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

BOS, EOS = 256, 257
CHATML = (
    "{% for m in messages %}"
    "{% if m.role == 'system' and m.content == 'no' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_ids(text: str | bytes) -> list[int]:
    """The tiny model's ids: one a byte."""
    return list(text.encode() if isinstance(text, str) else text)


def byte_tokenizer(add_bos: bool = False) -> Tokenizer:
    """Byte-level without merges: id == byte, then `<|im_start|>` (BOS) and `<|im_end|>` (EOS)."""
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in itself]
    chars = {byte: chr(byte) for byte in itself} | {byte: chr(256 + index) for index, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab={char: byte for byte, char in chars.items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(name, normalized=False, special=True) for name in ("<|im_start|>", "<|im_end|>")]
    )
    if add_bos:
        from tokenizers.processors import TemplateProcessing

        tokenizer.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", BOS)])
    return tokenizer


def write_model(folder: Path, *, add_bos: bool = False, template: str | None = CHATML) -> Path:
    """A checkpoint folder without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    byte_tokenizer(add_bos).save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"bos_token_id": BOS, "eos_token_id": EOS}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<|im_start|>"}}))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def fake_engine(folder: Path, script: Any = None, *, max_request_tokens: int = 512, **options: Any) -> FakeEngine:
    """A fake engine with the tiny model; `script` is what its requests generate, by default the text "hello"."""
    model = msgspec.structs.replace(
        MODEL,
        name="tiny",
        path=str(folder),
        vocab_size=258,
        max_model_len=1024,
        max_request_tokens=max_request_tokens,
        eos_token_ids=(EOS,),
    )
    return FakeEngine(script or (lambda prompt: byte_ids("hello")), model=model, **options)


@dataclasses.dataclass
class Server:
    """A running frontend."""

    url: str
    engine: FakeEngine

    def http(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, **{"timeout": 20, **options})

    def wait_for_health(self, status: int) -> httpx.Response:
        """/health's reply, once it has this status."""
        with self.http() as http:
            wait_until(lambda: http.get("/health").status_code == status)
            return http.get("/health")


def wait_until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Poll until true; fails after the timeout."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


@contextlib.contextmanager
def serving(
    *engines: FakeEngine,
    client_options: dict[str, Any] | None = None,
    port: int = 0,
    tracer: Any = None,
    **settings: Any,
) -> Iterator[Server]:
    """A frontend over started engines, in a thread, on a loopback port, by default a free one."""
    listener = bind("127.0.0.1", port)
    options = FrontendSettings(engine=tuple(engine.endpoint for engine in engines), **settings)
    clients = [AsyncClient(endpoint, **(client_options or {})) for endpoint in options.engine]
    app = create_app(options, clients, tracer=tracer)
    config = uvicorn.Config(app, log_level="warning", http=BoundedHttp)
    server = HttpServer(config, app.state.end_streams)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
    thread.start()
    try:
        yield Server(f"http://127.0.0.1:{listener.getsockname()[1]}", engines[0])
    finally:
        server.should_exit = True
        thread.join(timeout=20)
        assert not thread.is_alive(), "the frontend did not stop"


@contextlib.contextmanager
def scripted(
    folder: Path, script: Iterable[Any], *, client_options: dict[str, Any] | None = None, **options: Any
) -> Iterator[Server]:
    """A healthy frontend whose engine answers every request with `script`."""
    items = list(script)
    engine = fake_engine(folder, lambda prompt: iter(items), **options)
    with engine, serving(engine, client_options=client_options) as server:
        server.wait_for_health(200)
        yield server

"""Real Coldblock processes for tests: started, waited for, and certainly gone afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
from coldblock import Client

START_S = 60.0

TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "torch_dtype": "float32",
}


def write_tiny_model(folder: Path, **changes: object) -> Path:
    """A checkpoint folder with a config alone, for `--load-format dummy`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**TINY_LLAMA, **changes}))
    return folder


@dataclass
class EngineProcess:
    """A running `coldblock engine`."""

    process: subprocess.Popen[str]
    endpoint: str
    events_endpoint: str
    log: Path

    def client(self, **options: object) -> Client:
        return Client(self.endpoint, **options)  # type: ignore[arg-type]

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 30.0) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout_s)


@contextlib.contextmanager
def running_engine(
    model: Path | str,
    *flags: str,
    env: dict[str, str] | None = None,
    program: Sequence[str] = ("-m", "coldblock", "engine"),
) -> Iterator[EngineProcess]:
    """A started engine that has answered once. Its log is shown when it does not come up."""
    with tempfile.TemporaryDirectory(prefix="cb-") as folder:
        endpoint, events = f"ipc://{folder}/e.sock", f"ipc://{folder}/v.sock"
        log = Path(folder) / "engine.log"
        command = [sys.executable, *program, str(model), "--threads", "1"]
        command += ["--endpoint", endpoint, "--events-endpoint", events, *flags]
        with log.open("w") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=output, text=True, env={**os.environ, **(env or {})}, cwd=folder
            )
        engine = EngineProcess(process, endpoint, events, log)
        try:
            with engine.client() as client:
                try:
                    client.ready(START_S)
                except Exception as error:
                    raise AssertionError(f"the engine did not come up:\n{log.read_text()}") from error
            yield engine
        finally:
            if process.poll() is None:
                process.kill()
            process.wait(10)


@dataclass
class FrontendProcess:
    """A running `coldblock frontend`."""

    process: subprocess.Popen[str]
    url: str
    log: Path

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 30.0) -> list[str]:
        """End it; all that it wrote, to stdout and stderr."""
        self.process.send_signal(number)
        self.process.wait(timeout_s)
        return self.log.read_text().splitlines()


@contextlib.contextmanager
def running_frontend(
    engine_endpoint: str,
    *flags: str,
    env: dict[str, str] | None = None,
    program: Sequence[str] = ("-m", "coldblock"),
    port: int | None = None,
) -> Iterator[FrontendProcess]:
    """A started frontend that answers on `port`, or a free one, whether or not it has found its engine."""
    with tempfile.TemporaryDirectory(prefix="cb-") as folder:
        port = port or _free_port()
        log = Path(folder) / "frontend.log"
        command = [sys.executable, *program, "frontend", "--engine", engine_endpoint, "--port", str(port), *flags]
        with log.open("w") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=output, text=True, env={**os.environ, **(env or {})}
            )
        frontend = FrontendProcess(process, f"http://127.0.0.1:{port}", log)
        try:
            end = time.monotonic() + START_S
            while not _answers(frontend.url):
                assert time.monotonic() < end and process.poll() is None, f"it did not come up:\n{log.read_text()}"
                time.sleep(0.05)
            yield frontend
        finally:
            process.terminate()  # it says goodbye to its engine
            process.wait(30)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _answers(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/version").status_code == 200
    return False

"""What clients send and what models answer is in no log, at any level and whatever fails, unless it is asked for."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from coldblock.protocol.messages import Finished, Refused
from fake_engine import FakeEngine, usage
from frontend_kit import byte_ids, fake_engine, wait_until
from processes import FrontendProcess, running_frontend

PROMPT, ANSWER = "PROMPTCANARY", "ANSWERCANARY"
SABOTAGED = """
import asyncio, sys
from coldblock.__main__ import main
from coldblock.frontend.detokenizer import Detokenizer
from coldblock.frontend.tokenization import ModelText
encode, push = ModelText.encode, Detokenizer.push

async def fail(text):
    raise RuntimeError(f"cannot do {text}")

async def broken_encode(self, text, **options):
    if "before" in text:
        await fail(text)
    if "aside" in text:
        asyncio.get_running_loop().create_task(fail(text))
    return await encode(self, text, **options)

def broken_push(self, ids):
    text = push(self, ids)
    if text.startswith("!"):
        raise RuntimeError(f"cannot show {text}")
    return text

ModelText.encode, Detokenizer.push = broken_encode, broken_push
sys.exit(main())
"""


def script(prompt: list[int]) -> Iterator[object]:
    """Answers by what the prompt says."""
    text = bytes(prompt).decode()
    yield from byte_ids(ANSWER)
    if "during" in text:
        yield from byte_ids("!" + ANSWER)
    if "refused" in text:
        yield Refused("", "prompt", text, "another")
    if "error" in text:
        yield Finished("error", usage(), error=f"step failed on {text}")
    if "long" in text:
        yield from byte_ids(ANSWER * 20)


@contextlib.contextmanager
def frontend(engine: FakeEngine, *flags: str) -> Iterator[FrontendProcess]:
    """One with all that can go wrong in it, once it is healthy."""
    flags = ("--shutdown-timeout", "1", *flags)
    with running_frontend(engine.endpoint, *flags, program=("-c", SABOTAGED)) as running:
        wait_until(lambda: httpx.get(f"{running.url}/health").status_code == 200)
        yield running


def provoke(url: str, engine: FakeEngine) -> None:
    """Everything that can go wrong with a request, each with the canary in it."""
    with httpx.Client(base_url=url, timeout=20) as http:
        for stream in (False, True):
            for what in ("fine", "before", "aside", "during", "refused", "error"):
                with contextlib.suppress(httpx.TransportError):
                    http.post("/v1/completions", json={"prompt": f"{what} {PROMPT}", "stream": stream})
        http.post("/v1/completions", content=f'{{"prompt": "{PROMPT}'.encode())
        for wrong in ({"n": PROMPT}, {"stop": [[PROMPT]]}, {"model": PROMPT}, {PROMPT: 1}, {"prompt": [PROMPT]}):
            http.post("/v1/completions", json={"prompt": PROMPT, **wrong})
        http.post("/v1/completions", json={"prompt": PROMPT * 1000})
        http.post("/v1/chat/completions", json={"messages": [{"role": "system", "content": "no"}, {"x": PROMPT}]})
        http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": f"before {PROMPT}"}]})
        http.post("/tokenize", json={"prompt": f"before {PROMPT}"})
        http.post(f"/{PROMPT}?{PROMPT}={PROMPT}", headers={"x-request-id": f"{PROMPT} is no id"})
        http.get("/v1/models", params={"prompt": PROMPT})
        http.get(f"/v1/models/{PROMPT}")
        http.request(PROMPT, "/v1/models")
        with http.stream("POST", "/v1/completions", json={"prompt": f"long {PROMPT}", "stream": True}) as left:
            next(left.iter_lines())
    address = urlsplit(url)
    assert address.hostname is not None
    with socket.create_connection((address.hostname, address.port or 0)) as raw:
        raw.sendall(f"{PROMPT} {PROMPT}\r\n{PROMPT}\r\n\r\n".encode())
        raw.recv(1000)
    with httpx.stream("POST", f"{url}/v1/completions", json={"prompt": f"long {PROMPT}", "stream": True}) as cut:
        lines = cut.iter_lines()
        next(lines)
        engine.stop()
        with contextlib.suppress(httpx.TransportError):
            list(lines)


@pytest.mark.parametrize("log_format", ["human", "json"])
def test_prompts_and_answers_are_in_no_log(model_folder: Path, log_format: str) -> None:
    flags = ("--log-level", "debug", "--log-format", log_format)
    with fake_engine(model_folder, script) as engine, frontend(engine, *flags) as running:
        provoke(running.url, engine)
        lines = running.stop()
    log = "\n".join(lines)
    assert PROMPT not in log and ANSWER not in log
    assert "builtins.RuntimeError" in log and "in broken_push" in log and "never retrieved" in log
    assert "POST /v1/completions 200" in log and "GET /v1/models 200" in log and "POST other 404" in log
    if log_format == "json":
        events = [json.loads(line) for line in lines]
        assert {event["process"] for event in events} == {"frontend"}
        assert any(event["message"].startswith("http://127.0.0.1:") for event in events), "the ready line is an event"
        (access,) = [event for event in events if event.get("path") == "/v1/models/{name}"]
        assert (access["method"], access["status"]) == ("GET", 404) and access["request_id"]


def test_they_are_logged_when_asked_for(model_folder: Path) -> None:
    with fake_engine(model_folder, script) as engine, frontend(engine, "--log-prompts") as running:
        for stream in (False, True):
            httpx.post(f"{running.url}/v1/completions", json={"prompt": f"fine {PROMPT}", "stream": stream})
        httpx.post(f"{running.url}/v1/completions", json={"prompt": f"before {PROMPT}"})
        log = "\n".join(running.stop())
    assert log.count(f"has the prompt fine {PROMPT}") == 2 and log.count(f"was answered with {ANSWER}") == 2
    assert f"RuntimeError: cannot do before {PROMPT}" in log

"""What happens when something leaves, dies, refuses or breaks: the right status, at once, for nobody else."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from coldblock.frontend.engines import EnginePool
from coldblock.protocol.messages import Finished, Refused, Submit
from fake_engine import FakeEngine, usage
from frontend_kit import Server, byte_ids, fake_engine, scripted, serving, wait_until

QUICK = {"heartbeat_s": 0.1, "death_s": 3.0}  # a busy machine must not look like a dead engine
COMPLETIONS = "/v1/completions"
LONG: dict[str, Any] = {"prompt": "x", "max_tokens": 500}


@pytest.fixture
def slow(model_folder: Path) -> Iterator[Server]:
    """An engine that makes a token every 20 ms, for ten seconds."""
    script = byte_ids("ab" * 250)
    with scripted(model_folder, script, delay_s=0.02, client_options=QUICK) as server:
        yield server


def submits(engine: FakeEngine) -> list[Submit]:
    return [message for message in list(engine.received) if isinstance(message, Submit)]


# ---------------------------------------------------------------- clients that leave


@pytest.mark.parametrize("choices", [1, 3])
def test_leaving_a_stream_aborts_it_and_no_other(slow: Server, choices: int) -> None:
    with slow.http() as http, http.stream("POST", COMPLETIONS, json={**LONG, "stream": True}) as stays:
        lines = stays.iter_lines()
        next(lines)
        with (
            slow.http() as other,
            other.stream("POST", COMPLETIONS, json={**LONG, "stream": True, "n": choices}) as left,
        ):
            next(left.iter_lines())
            slow.engine.wait_for(Submit, 1 + choices)
        leavers = {submit.request_id for submit in submits(slow.engine)[1:]}
        assert len(leavers) == choices
        wait_until(lambda: leavers <= slow.engine.aborted)
        assert next(line for line in lines if line).startswith("data:"), "the one that stayed goes on"
        assert slow.engine.aborted == leavers


def test_leaving_without_a_stream_aborts_too(slow: Server) -> None:
    with slow.http() as http, pytest.raises(httpx.ReadTimeout):
        http.post(COMPLETIONS, json={**LONG, "n": 2}, timeout=0.3)
    wait_until(lambda: {submit.request_id for submit in submits(slow.engine)} == slow.engine.aborted)
    assert len(slow.engine.aborted) == 2
    assert 'status="499"' in slow.http().get("/metrics").text


def test_leaving_before_the_first_token_aborts(model_folder: Path) -> None:
    with scripted(model_folder, ["swapping_out"], delay_s=30) as server:  # the token after it never comes
        with server.http() as http, pytest.raises(httpx.ReadTimeout):
            http.post(COMPLETIONS, json={**LONG, "stream": True}, timeout=0.3)
        (submit,) = server.engine.wait_for(Submit)
        wait_until(lambda: submit.request_id in server.engine.aborted)


def test_leaving_while_sending_the_body_is_no_fault_of_ours(slow: Server, caplog: pytest.LogCaptureFixture) -> None:
    host, _, port = slow.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=20) as leaver:
        leaver.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        wait_until(lambda: open_requests(slow, COMPLETIONS) == 1)
    wait_until(lambda: open_requests(slow, COMPLETIONS) == 0)
    assert f'path="{COMPLETIONS}",status="499"' in slow.http().get("/metrics").text
    assert not caplog.records


def open_requests(server: Server, path: str) -> float:
    begin = f'coldblock_http_open_requests{{path="{path}"}}'
    lines = server.http().get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(begin))


# ---------------------------------------------------------------- engines that die, freeze, come back


def test_without_an_engine_everything_is_a_503_that_says_so(model_folder: Path) -> None:
    absent = fake_engine(model_folder)
    with serving(absent) as server, server.http() as http:
        for reply in (
            http.get("/health"),
            http.get("/v1/models"),
            http.post(COMPLETIONS, json={"prompt": "x"}),
            http.post(COMPLETIONS, json={"prompt": "x", "stream": True}),
            http.post("/tokenize", json={"prompt": "x"}),
        ):
            assert reply.status_code == 503 and int(reply.headers["retry-after"]) >= 1
            assert absent.endpoint in reply.json()["error"]["message"]
        assert http.get("/metrics").status_code == 200


def test_an_engine_that_dies_ends_open_requests_and_health_and_returns(slow: Server, model_folder: Path) -> None:
    with ThreadPoolExecutor() as threads, slow.http() as http:
        whole = threads.submit(lambda: slow.http().post(COMPLETIONS, json=LONG))
        with http.stream("POST", COMPLETIONS, json={**LONG, "stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            slow.engine.wait_for(Submit, 2)
            slow.engine.stop()
            last = [line for line in lines if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_unavailable"
        assert whole.result(timeout=20).status_code == 503
    slow.wait_for_health(503)
    folder = Path(slow.engine.endpoint.removeprefix("ipc://")).parent
    folder.mkdir()
    with fake_engine(model_folder, endpoint=slow.engine.endpoint):
        slow.wait_for_health(200)
        assert slow.http().post(COMPLETIONS, json={"prompt": "x"}).json()["choices"][0]["text"] == "hello"
    shutil.rmtree(folder)


def test_the_official_client_sees_the_death_in_mid_stream(slow: Server) -> None:
    api = openai.OpenAI(base_url=f"{slow.url}/v1", api_key="none", max_retries=0, timeout=20)
    stream = iter(api.completions.create(model="tiny", stream=True, **LONG))
    next(stream)
    slow.engine.stop()
    with pytest.raises(openai.APIError):
        list(stream)


def test_a_frozen_engine_is_not_healthy(slow: Server) -> None:
    slow.engine.frozen = True
    slow.wait_for_health(503)
    slow.engine.frozen = False
    slow.wait_for_health(200)


def test_an_engine_whose_loop_stands_is_not_healthy(slow: Server) -> None:
    slow.engine.step_age_s = 1000.0
    slow.wait_for_health(503)
    assert slow.http().post(COMPLETIONS, json={"prompt": "x"}).status_code == 503
    slow.engine.step_age_s = 5.0  # a long prefill is not death
    slow.wait_for_health(200)


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with fake_engine(tmp_path / "gone") as engine, serving(engine) as server:
        wait_until(lambda: "--tokenizer" in server.http().get("/health").text)
        reply = server.http().post(COMPLETIONS, json={"prompt": "x"})
        assert reply.status_code == 503 and str(tmp_path / "gone" / "tokenizer.json") in reply.text


def test_the_tokenizer_folder_can_be_named(tmp_path: Path, model_folder: Path) -> None:
    with fake_engine(tmp_path / "gone") as engine, serving(engine, tokenizer=model_folder) as server:
        server.wait_for_health(200)


def test_requests_go_to_the_least_loaded_living_engine(model_folder: Path) -> None:
    script: Any = lambda prompt: iter(byte_ids("ab" * 250))  # noqa: E731
    with (
        fake_engine(model_folder, script, delay_s=0.02) as one,
        fake_engine(model_folder, script, delay_s=0.02) as two,
        serving(one, two, client_options=QUICK) as server,
    ):
        wait_until(lambda: both_up(server))
        with server.http() as http:
            with http.stream("POST", COMPLETIONS, json={**LONG, "stream": True, "n": 2}) as first:
                next(held := first.iter_lines())  # a reader that is dropped closes its stream
                with http.stream("POST", COMPLETIONS, json={**LONG, "stream": True}) as second:
                    next(second.iter_lines())
                    assert sorted([len(submits(one)), len(submits(two))]) == [1, 2]
                    next(held)
            gone, left = (one, two) if len(submits(one)) == 2 else (two, one)
            gone.stop()
            wait_until(lambda: not both_up(server))
            assert http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 2}).status_code == 200
            assert len(submits(left)) == 2


def both_up(server: Server) -> bool:
    lines = server.http().get("/metrics").text.splitlines()
    return [line.split()[-1] for line in lines if line.startswith("coldblock_engine_up{")] == ["1.0", "1.0"]


# ---------------------------------------------------------------- engines that refuse or fail one request


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("item", "status", "param"),
    [
        (Refused("", "max_tokens", "9", "at most 8"), 400, "max_tokens"),
        (Finished("error", usage(), error="logits were not finite"), 500, None),
        (Finished("abort", usage()), 503, None),
    ],
)
def test_what_ends_before_the_first_token_becomes_a_status(
    model_folder: Path, item: Any, status: int, param: str | None, stream: bool
) -> None:
    with scripted(model_folder, [item]) as server:
        reply = server.http().post(COMPLETIONS, json={"prompt": "x", "stream": stream})
        assert (reply.status_code, reply.json()["error"]["param"]) == (status, param)


def test_a_failure_in_mid_stream_becomes_an_error_event(model_folder: Path) -> None:
    with scripted(model_folder, [104, Finished("error", usage(), error="logits were not finite")]) as server:
        text = server.http().post(COMPLETIONS, json={"prompt": "x", "stream": True}).text
    *_, last = [line for line in text.split("\n") if line]
    assert "logits were not finite" in json.loads(last.removeprefix("data: "))["error"]["message"]


def test_one_choice_that_fails_ends_all(model_folder: Path) -> None:
    # fails late enough that the other choice has been submitted
    scripts = iter([[*byte_ids("ab" * 12), Finished("error", usage(), error="no")], byte_ids("ab" * 200)])
    with (
        fake_engine(model_folder, lambda prompt: iter(next(scripts)), delay_s=0.02) as engine,
        serving(engine) as server,
    ):
        server.wait_for_health(200)
        assert server.http().post(COMPLETIONS, json={**LONG, "n": 2}).status_code == 500
        wait_until(lambda: submits(engine)[1].request_id in engine.aborted)


# ---------------------------------------------------------------- the gate


def test_a_key_may_hold_any_character(model_folder: Path) -> None:
    with fake_engine(model_folder) as engine, serving(engine, api_key="schlüssel") as server, server.http() as http:
        server.wait_for_health(200)
        keys = {"schlüssel": 200, "schlussel": 401}
        for key, status in keys.items():
            assert http.get("/v1/models", headers={"authorization": f"Bearer {key}".encode()}).status_code == status


def test_keys(model_folder: Path) -> None:
    with fake_engine(model_folder) as engine, serving(engine, api_key="one,two") as server, server.http() as http:
        server.wait_for_health(200)
        for headers in ({}, {"authorization": "Bearer three"}, {"authorization": "Basic one"}, {"authorization": "é"}):
            raw = {key: value.encode() for key, value in headers.items()}
            for path in ("/v1/models", "/v1/models/tiny"):
                reply = http.get(path, headers=raw)
                assert reply.status_code == 401 and reply.json()["error"]["code"] == "invalid_api_key"
            assert http.post("/tokenize", json={"prompt": "x"}, headers=raw).status_code == 401
        for key in ("one", "two"):
            assert http.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == 200
        for path in ("/health", "/metrics", "/version"):
            assert http.get(path).status_code == 200


def test_bodies_over_the_limit(model_folder: Path) -> None:
    with fake_engine(model_folder) as engine, serving(engine, max_body_mb=1) as server, server.http() as http:
        server.wait_for_health(200)
        big = b'{"prompt": "' + b"x" * 2**20 + b'"}'
        declared = http.post(COMPLETIONS, content=big)
        chunked = http.post(COMPLETIONS, content=iter([big[: 2**19], big[2**19 :], b" " * 100]))
        for reply in (declared, chunked):
            assert reply.status_code == 413 and reply.json()["error"]["code"] == "body_too_large"
            assert reply.headers["x-request-id"]


def test_endless_headers_are_cut_off(server: Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nx-long: ")
        sent = 0
        with pytest.raises(OSError):
            while sent < 64 * 2**20:
                connection.sendall(b"a" * 2**16)
                sent += 2**16
    assert server.http().get("/health", headers={"x-long": "a" * 2**15}).status_code == 200


def test_a_declared_body_over_the_limit_is_not_read(server: Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_the_request_id_is_the_clients_or_ours(server: Server) -> None:
    with server.http() as http:
        assert http.get("/version", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
        for hostile in ("a b", "x" * 500, "é\r".strip()):
            got = http.get("/version", headers={"x-request-id": hostile.encode()}).headers["x-request-id"]
            assert got != hostile and len(got) == 32


def test_a_bug_is_a_500_with_the_error_body(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: EnginePool, name: str | None) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(EnginePool, "choose", broken)
    reply = server.http().post(COMPLETIONS, json={"prompt": "x"})
    assert reply.status_code == 500 and reply.headers["x-request-id"] in reply.json()["error"]["message"]
    assert "secret" not in reply.text


def test_health_stays_fast_while_a_huge_body_is_read(server: Server) -> None:
    body = json.dumps({"prompt": [7] * 5_000_000}).encode()
    with ThreadPoolExecutor() as threads:
        huge = threads.submit(lambda: server.http().post(COMPLETIONS, content=body))
        with server.http(timeout=5) as http:
            while not huge.done():
                assert http.get("/health").status_code == 200
    assert huge.result().json()["error"]["code"] == "context_length_exceeded"

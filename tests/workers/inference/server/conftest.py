"""Fixtures: an untrained model with 256 words and a chat template, served in a thread."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import tokenizers

from tests.workers.inference.untrained import untrained_folder
from workers.contracts.wire.serving_reports import KEY_HEADER, EngineState, serve_key
from workers.inference.engine import Engine
from workers.inference.request import Request
from workers.inference.serve import run_serve
from workers.inference.spec_loading import load_run
from workers.runtime.environment import read_environment
from workers.runtime.exit_codes import Outcome

SHAPE = {
    "name": "words",
    "layers": 2,
    "hidden": 32,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 48,
    "vocab": 256,
    "max_seq_len": 256,
}
TEMPLATE = (
    "{% for each in messages %}{% if each.role == 'narrator' %}{{ raise_exception('unknown role') "
    "}}{% endif %}"
    "w1 {{ each.content }} w2 {% endfor %}w3"
)
FENCE = "f" * 32


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(tmp_path_factory.mktemp("served")) / "wordy"
    folder.mkdir()
    untrained_folder(folder, SHAPE)
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({f"w{n}": n for n in range(256)}, unk_token="w0")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


class Serving:
    """A serve run, one thread per rank, each with its own run directory as on separate nodes.

    `request_action` writes control.json, `wait` returns the outcome.
    """

    def __init__(self, folder: Path, weights: Path, *, ranks: int = 1, **body: Any) -> None:
        self.folder = folder
        self._folders = [folder, *(folder / f"node-{rank}" for rank in range(1, ranks))]
        for each in self._folders:
            each.mkdir(parents=True, exist_ok=True)
        plan = {"dp": ranks, "global_batch_size": ranks}
        spec = {"kind": "serve", "model": {"path": str(weights)}, "plan": plan, "serve": body}
        (folder / "spec.json").write_text(json.dumps(spec))
        self.outcome: Outcome | BaseException | None = None
        self._clients: list[openai.OpenAI] = []
        self._threads = [
            threading.Thread(target=self._run, args=(rank, ranks), daemon=True)
            for rank in range(ranks)
        ]
        for thread in self._threads:
            thread.start()
        serving = self.event("serving")
        self.url = f"http://{serving['host']}:{serving['port']}"
        self.control_headers = {KEY_HEADER: serve_key(FENCE)}
        self.http = httpx.Client(base_url=self.url, timeout=90, trust_env=False)

    def _run(self, rank: int, ranks: int) -> None:
        env = {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": str(rank),
            "ORRERY_RUN": "9",
            "ORRERY_ATTEMPT": "1",
            "ORRERY_FENCE": FENCE,
        }
        environment = read_environment(self._folders[rank], env=env)
        try:
            outcome: Outcome | BaseException = run_serve(
                load_run(self.folder / "spec.json"), environment
            )
        except BaseException as error:
            outcome = error
        if rank == 0:
            self.outcome = outcome

    def client(self, key: str = "any") -> openai.OpenAI:
        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=90)
        self._clients.append(client)
        return client

    def state(self) -> EngineState:
        return EngineState.model_validate(
            self.http.get("/internal/state", headers=self.control_headers).json()
        )

    def idle_state(self) -> EngineState:
        """The state once no request is in progress."""
        return self.until(
            lambda: state if not (state := self.state()).running + state.waiting else None
        )

    def event(self, kind: str) -> dict[str, Any]:
        return self.until(
            lambda: next(
                (each["data"] for each in self.lines("events") if each["type"] == kind), None
            )
        )

    def lines(self, name: str, rank: int = 0) -> list[dict[str, Any]]:
        path = self._folders[rank] / f"rank-{rank}" / f"{name}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def until(self, read: Any, seconds: float = 90) -> Any:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if (value := read()) is not None:
                return value
            if self.outcome is not None and not self._threads[0].is_alive():
                break
            time.sleep(0.01)
        raise AssertionError(
            f"not within {seconds} s; outcome {self.outcome!r}, events {self.lines('events')}"
        )

    def request_action(self, action: str = "stop", *, grace_s: float = 10) -> None:
        for each in self._folders:
            (each / "control.json").write_text(
                json.dumps({"action": action, "id": 1, "grace_s": grace_s})
            )

    def wait(self) -> Outcome | BaseException | None:
        for thread in self._threads:
            thread.join(90)
            assert not thread.is_alive()
        for each in (self.http, *self._clients):
            each.close()
        return self.outcome


@contextmanager
def open_request(serving: Serving, body: dict[str, Any]) -> Iterator[socket.socket]:
    """Send a completion request; the client disconnects at the end."""
    text = json.dumps(body)
    host, port = serving.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=90) as connection:
        connection.sendall(
            (
                "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: "
                f"{len(text)}\r\n\r\n{text}"
            ).encode()
        )
        yield connection


class Steps:
    """Lets all engines of this process step freely, or one step at a time.

    A held engine still accepts and aborts requests and reports its state.
    """

    def __init__(self) -> None:
        self._free, self._one = threading.Event(), threading.Semaphore(0)
        self._free.set()

    def hold(self) -> None:
        self._free.clear()

    def allow_one(self) -> None:
        self._one.release()

    def resume(self) -> None:
        self._free.set()

    def is_allowed(self) -> bool:
        return self._free.is_set() or self._one.acquire(timeout=0.002)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[Steps]:
    created, step = Steps(), Engine.step

    def step_if_allowed(engine: Engine) -> list[Request]:
        return step(engine) if created.is_allowed() else []

    monkeypatch.setattr(Engine, "step", step_if_allowed)
    yield created
    created.resume()


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory, weights: Path) -> Iterator[Serving]:
    created = Serving(
        tmp_path_factory.mktemp("run"), weights, max_seqs=4, max_waiting=60, kv_blocks=200
    )
    yield created
    created.request_action()
    created.wait()


@pytest.fixture
def start_server(tmp_path: Path, weights: Path) -> Any:
    servers: list[Serving] = []

    def start(**body: Any) -> Serving:
        servers.append(Serving(tmp_path / f"run-{len(servers)}", weights, **body))
        return servers[-1]

    yield start
    for server in servers:
        server.request_action("stop", grace_s=0)
        server.wait()

"""A model that no one trained, of 256 words with a chat template, and its serve run in a thread of
this process.
"""

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
from workers.runtime.exits import Outcome

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
    "{% for each in messages %}{% if each.role == 'nobody' %}{{ raise_exception('nobody speaks') "
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
    """A serve run in a thread a rank, each with a run directory of its own as on nodes of their
    own; `ask` asks for its
    end by control.json, `ended` gives its outcome."""

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
        told = self.event("serving")
        self.url = f"http://{told['host']}:{told['port']}"
        self.house = {KEY_HEADER: serve_key(FENCE)}
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
        around = read_environment(self._folders[rank], env=env)
        try:
            outcome: Outcome | BaseException = run_serve(
                load_run(self.folder / "spec.json"), around
            )
        except BaseException as error:
            outcome = error
        if rank == 0:
            self.outcome = outcome

    def client(self, key: str = "any") -> openai.OpenAI:
        found = openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=90)
        self._clients.append(found)
        return found

    def state(self) -> EngineState:
        return EngineState.model_validate(
            self.http.get("/internal/state", headers=self.house).json()
        )

    def settled(self) -> EngineState:
        """The state once nothing is on its way."""
        return self.until(
            lambda: found if not (found := self.state()).running + found.waiting else None
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

    def until(self, ask: Any, seconds: float = 90) -> Any:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if (found := ask()) is not None:
                return found
            if self.outcome is not None and not self._threads[0].is_alive():
                break
            time.sleep(0.01)
        raise AssertionError(
            f"not within {seconds} s; outcome {self.outcome!r}, events {self.lines('events')}"
        )

    def ask(self, action: str = "stop", *, grace_s: float = 10) -> None:
        for each in self._folders:
            (each / "control.json").write_text(
                json.dumps({"action": action, "id": 1, "grace_s": grace_s})
            )

    def ended(self) -> Outcome | BaseException | None:
        for thread in self._threads:
            thread.join(90)
            assert not thread.is_alive()
        for each in (self.http, *self._clients):
            each.close()
        return self.outcome


@contextmanager
def asked(serving: Serving, body: dict[str, Any]) -> Iterator[socket.socket]:
    """A completion is asked for, and whoever asked is gone at the end."""
    text = json.dumps(body)
    host, port = serving.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=90) as line:
        line.sendall(
            (
                "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: "
                f"{len(text)}\r\n\r\n{text}"
            ).encode()
        )
        yield line


class Steps:
    """The steps of all engines of this process: as they come, or one when a test says so. Meanwhile
    an engine takes
    requests, gives them up and tells its state, as between any two steps."""

    def __init__(self) -> None:
        self._free, self._one = threading.Event(), threading.Semaphore(0)
        self._free.set()

    def hold(self) -> None:
        self._free.clear()

    def one(self) -> None:
        self._one.release()

    def go(self) -> None:
        self._free.set()

    def may(self) -> bool:
        return self._free.is_set() or self._one.acquire(timeout=0.002)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[Steps]:
    made, step = Steps(), Engine.step

    def when_it_may(engine: Engine) -> list[Request]:
        return step(engine) if made.may() else []

    monkeypatch.setattr(Engine, "step", when_it_may)
    yield made
    made.go()


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory, weights: Path) -> Iterator[Serving]:
    made = Serving(
        tmp_path_factory.mktemp("run"), weights, max_seqs=4, max_waiting=60, kv_blocks=200
    )
    yield made
    made.ask()
    made.ended()


@pytest.fixture
def made(tmp_path: Path, weights: Path) -> Any:
    found: list[Serving] = []

    def make(**body: Any) -> Serving:
        found.append(Serving(tmp_path / f"run-{len(found)}", weights, **body))
        return found[-1]

    yield make
    for each in found:
        each.ask("stop", grace_s=0)
        each.ended()

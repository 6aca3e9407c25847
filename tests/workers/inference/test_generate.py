"""The generate command: input lines, output lines, restarts and errors."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from tests.workers.inference.untrained import BYTES, untrained_folder
from workers.contracts.wire.points import Point, RunEvent
from workers.inference.main import main

KILLED = """
import os, signal, sys
from workers.inference.generate.answer_file import AnswerFile
from workers.inference.main import main
real = AnswerFile.write
def write(self, index, answer):
    real(self, index, answer)
    if self.done >= 5:
        os.write(self._file, b'{"id": 5, "te')
        os.kill(os.getpid(), signal.SIGKILL)
AnswerFile.write = write
main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return untrained_folder(Path(tmp_path_factory.mktemp("weights")))


class Room:
    """A spec, its prompts and its answers in one folder."""

    def __init__(self, folder: Path, weights: Path) -> None:
        self.folder, self.weights = folder, weights
        self.output = folder / "out" / "answers.jsonl"
        self.write(
            [
                {"id": n, "prompt": "ab" * (1 + n % 9), "max_new_tokens": 3 + n * 7 % 19}
                for n in range(24)
            ]
        )

    def write(self, lines: list[Any], **body: Any) -> None:
        text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
        (self.folder / "prompts.jsonl").write_text(text)
        record = {
            "input": str(self.folder / "prompts.jsonl"),
            "output": str(self.output),
            "seed": 3,
            **body,
        }
        self.spec(generate=record)

    def spec(self, **fields: Any) -> None:
        path = self.folder / "run.json"
        old = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(
            json.dumps({"kind": "generate", "model": {"path": str(self.weights)}, **old, **fields})
        )

    @property
    def arguments(self) -> list[str]:
        return ["--spec", str(self.folder / "run.json"), "--dir", str(self.folder / "run")]

    def answers(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.output.read_text().splitlines()]


@pytest.fixture
def room(tmp_path: Path, weights: Path) -> Room:
    return Room(tmp_path, weights)


def test_a_killed_run_neither_repeats_nor_loses_a_line(room, monkeypatch):
    assert main(room.arguments) == 0
    whole = room.output.read_bytes()
    assert [each["id"] for each in room.answers()] == list(range(24))
    assert main(room.arguments) == 0 and room.output.read_bytes() == whole, "nothing is left to do"

    room.output.unlink()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", KILLED, *room.arguments], env=environment, capture_output=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    cut = room.output.read_bytes()
    assert cut.endswith(b'"te') and 5 <= cut.count(b"\n") < 24
    stepped = "workers.inference.metrics.EngineMetrics.step_finished"
    with monkeypatch.context() as patch:
        patch.setattr(stepped, lambda self: os.kill(os.getpid(), signal.SIGTERM))
        assert main(room.arguments) == 67
    assert json.loads((room.folder / "run/rank-0/exit.json").read_text())["class"] == "preempted"
    assert whole.startswith(room.output.read_bytes())
    assert main(room.arguments) == 0
    assert room.output.read_bytes() == whole


def test_points_and_events_while_it_runs(room):
    assert main(room.arguments) == 0
    folder = room.folder / "run/rank-0"
    points = [
        Point.from_dict(json.loads(line))
        for line in (folder / "points.jsonl").read_text().splitlines()
    ]
    record = [
        RunEvent.from_dict(json.loads(line))
        for line in (folder / "events.jsonl").read_text().splitlines()
    ]
    kernels, event = sorted(record, key=lambda each: each.type, reverse=True)
    ran = {row["op"]: row["reason"] for row in kernels.data["operations"]}
    assert (
        kernels.type == "kernels_chosen"
        and "a CPU tensor" in ran["paged_attention"]
        and "rms_norm" in ran
    )
    assert event.type == "generated" and event.data["answers"] == 24
    assert (
        points[-1].values["inference/running"] == points[-1].values["inference/kv_blocks_used"] == 0
    )
    assert points[-1].values["inference/ttft_s"] > 0 and points[-1].values["inference/tpot_s"] > 0
    new = sum(len(each["token_ids"]) for each in room.answers())
    assert points[-1].tokens == new - 24 + points[-1].values["inference/prompt_tokens"] + 24
    assert json.loads((folder / "exit.json").read_text())["class"] == "ok"


def test_each_kind_of_line(room):
    # or one byte would come again and again
    text, greedy = "Zoë", {"temperature": 0, "repetition_penalty": 3}
    lines = [
        {"id": {"any": 1}, "prompt": text, "logprobs": True, **greedy},
        {"id": None, "token_ids": list(text.encode()), **greedy},
        "",
        {
            "id": "a",
            "prompt": text,
            **greedy,
            "stop": bytes(range(128)).decode(),
            "seed": 8,
            "top_k": 5,
        },
    ]
    room.write(lines, max_new_tokens=12)
    assert main(room.arguments) == 0
    first, second, third = room.answers()
    assert [each["id"] for each in (first, second, third)] == [{"any": 1}, None, "a"]
    assert (
        first["token_ids"] == second["token_ids"] == third["token_ids"]
        and len(first["token_ids"]) == 12
    )
    assert (
        first["text"] == bytes(first["token_ids"]).decode(errors="replace")
        and first["finish_reason"] == "length"
    )
    assert len(first["logprobs"]) == 12 and max(first["logprobs"]) <= 0 and "logprobs" not in second
    stop = next(each for each in first["text"] if each.isascii())
    room.output.unlink()
    room.write([lines[0]], max_new_tokens=12, stop=[stop])
    assert main(room.arguments) == 0
    (stopped,) = room.answers()
    assert (
        stopped["finish_reason"] == "stop"
        and stopped["text"] == first["text"][: first["text"].index(stop)]
    )


def test_drafts_and_forms(room):
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 22]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    lines: list[dict[str, Any]] = [
        {"id": n, "prompt": "ab" * n, "temperature": 0} for n in range(1, 5)
    ]
    lines.append(
        {
            "id": "form",
            "prompt": "a",
            "json_schema": {"type": "object", **schema},
            "seed": 1,
            "top_logprobs": 2,
        }
    )
    bodies: list[dict[str, Any]] = [{}, {"speculate": {"ngram": 2}}]
    # by no measured times
    bodies.append({"draft": {"path": str(room.weights)}, "speculate": {"adaptive": False}})
    result = []
    for body in bodies:
        room.write(lines, max_new_tokens=30, **body)
        assert main(room.arguments) == 0
        result.append(room.answers())
        room.output.unlink()
        assert json.loads(result[-1][-1]["text"])["n"] in (1, 22)
        assert len(result[-1][-1]["top_logprobs"]) == len(result[-1][-1]["logprobs"])
    assert [each["token_ids"] for each in result[0]] == [each["token_ids"] for each in result[1]]
    assert [each["token_ids"] for each in result[0][:4]] == [
        each["token_ids"] for each in result[2][:4]
    ]
    record = [
        json.loads(line)["values"]
        for line in (room.folder / "run/rank-0/points.jsonl").read_text().splitlines()
    ]
    accepted = [
        values["inference/accepted_per_step"]
        for values in record
        if "inference/accepted_per_step" in values
    ]
    assert max(accepted) > 0.5, "the draft is the model itself"


def test_several_answers_and_beams(room):
    drawn = {"prompt": "ab", "seed": 4, "max_new_tokens": 6}
    beams = {**drawn, "beams": 4}
    room.write(
        [
            {"id": 1, **drawn, "n": 3},
            {"id": 2, **drawn},
            {"id": 3, **beams, "n": 2},
            {"id": 4, **beams},
        ]
    )
    assert main(room.arguments) == 0
    three, one, two, best = room.answers()
    assert (
        len(three["answers"]) == 3
        and len({tuple(each["token_ids"]) for each in three["answers"]}) == 3
    )
    assert (
        three["answers"][0]["token_ids"] == three["token_ids"] == one["token_ids"]
        and "answers" not in one
    )
    assert (
        two["token_ids"]
        == two["answers"][0]["token_ids"]
        == best["token_ids"]
        != two["answers"][1]["token_ids"]
    )


def test_messages_go_through_the_models_own_template_and_tokenizer(room, tmp_path):
    folder = shutil.copytree(room.weights, tmp_path / "chat")
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({f"w{n}": n for n in range(256)}, unk_token="w0")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    template = "{% for each in messages %}w1 {{ each.content }} w2 {% endfor %}w3"
    line = {
        "id": 1,
        "messages": [{"role": "user", "content": "w7 w9"}],
        "temperature": 0,
        "repetition_penalty": 3,
    }
    record: dict[str, Any] = {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(record))
    room.spec(model={"path": str(folder)})
    room.write(
        [line, {**line, "id": 2, "messages": None, "token_ids": [1, 7, 9, 2, 3]}], max_new_tokens=9
    )
    assert main(room.arguments) == 0
    first, second = room.answers()
    assert first["token_ids"] == second["token_ids"]
    assert first["text"].split() == [f"w{each}" for each in first["token_ids"]]

    room.output.unlink()
    end = first["text"].split()[4]
    (folder / "tokenizer_config.json").write_text(json.dumps({**record, "eos_token": end}))
    assert main(room.arguments) == 0
    stopped = room.answers()[0]
    assert stopped["finish_reason"] == "stop" and stopped["token_ids"] == first["token_ids"][:5]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"id": 1, "prompt": "a"}', '{"id": 1,'], "line 2: it is not JSON"),
        (["[1]"], "line 1: it is not a JSON object"),
        ([{"prompt": "a"}], "it has no id"),
        ([{"id": 1}], "it has nothing to answer"),
        ([{"id": 1, "prompt": "a", "token_ids": [1]}], "it has prompt and token_ids"),
        ([{"id": 1, "prompt": "a", "max_tokens": 3}], "unknown field 'max_tokens'"),
        ([{"id": 1, "prompt": 7}], "prompt must be a string"),
        ([{"id": 1, "token_ids": [1.5]}], "token_ids must be a list of integers"),
        ([{"id": 1, "messages": []}], "messages must be a list of {role, content}"),
        ([{"id": 1, "prompt": "a", "top_p": 2}], "top_p is 2; it must be a number from 0 to 1"),
        ([{"id": 1, "prompt": "a" * 96}], "has 96 tokens, the model's context is 96"),
        ([{"id": 1, "prompt": ""}], "the prompt is empty"),
        ([{"id": 1, "token_ids": [256]}], "the model's ids are 0 to 255"),
        ([{"id": 1, "messages": [{"role": "user", "content": "a"}]}], "no chat template"),
        (
            [{"id": 1, "prompt": "a", "json_schema": {"type": "tree"}}],
            "line 1: json_schema cannot be met",
        ),
        ([{"id": 1, "prompt": "a", "n": 17}], "at most 16 run at a time"),
        ([{"id": 1, "prompt": "a", "beams": 2, "n": 3}], "n is 3, beams is 2"),
    ],
)
def test_wrong_lines_are_reported_and_nothing_is_written(lines, message, room, capsys):
    room.write(lines)
    assert main(room.arguments) == 64
    assert message in capsys.readouterr().err
    assert not room.output.exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "script", "generate": None}, "this is script. Use kind generate"),
        ({"plan": {"cp": 2}}, "no cp in runs of kind generate, the plan has 2"),
        ({"plan": "auto"}, "does not choose a plan"),
        ({"plan": {"precision": "fp8"}}, "Use fp32 or bf16 or fp16"),
        ({"model": {"path": "nowhere"}}, "nowhere does not exist"),
        ({"speed": 1}, "speed"),
        ({"generate": {"draft": {**BYTES, "vocab": 300}}}, "a draft of the same family"),
        ({"generate": {"speculate": {}}}, "neither a draft model nor"),
    ],
)
def test_wrong_specs_are_reported(fields, message, room, capsys):
    if fields.get("generate"):
        places = {"input": str(room.folder / "prompts.jsonl"), "output": str(room.output)}
        fields = {"generate": {**fields["generate"], **places}}
    room.spec(**fields)
    assert main(room.arguments) == 64
    assert message in capsys.readouterr().err
    assert json.loads((room.folder / "run/rank-0/exit.json").read_text())["class"] == "user_error"


def test_answers_of_another_run_are_never_gone_on_with(room, capsys):
    lines = [{"id": 1, "prompt": "a"}, {"id": 2, "prompt": "b"}]
    room.write(lines, max_new_tokens=2)
    assert main(room.arguments) == 0
    retained = room.output.read_bytes()
    room.write(lines, max_new_tokens=3)
    assert main(room.arguments) == 64
    assert "holds answers of another spec or input; move it away" in capsys.readouterr().err
    (room.output.parent / ".answers.jsonl.made-by").unlink()
    room.write([lines[1], lines[0]], max_new_tokens=2)
    assert main(room.arguments) == 64
    assert "line 1 answers id 1, the input has 2 there" in capsys.readouterr().err
    assert room.output.read_bytes() == retained


def test_half_precision_and_no_weights(room):
    room.spec(model="llama-tiny", plan={"precision": "bf16"})
    room.write([{"id": n, "token_ids": [1, 2, n]} for n in range(3)], max_new_tokens=4)
    assert main(room.arguments) == 0
    assert [each["text"] for each in room.answers()] == [None] * 3
    room.output.unlink()
    room.write(
        [{"id": 1, "prompt": "Zo\u00eb"}, {"id": 2, "token_ids": [90, 111]}], max_new_tokens=4
    )
    assert main(room.arguments) == 0  # a preset of 256 ids, asked in text, reads it as bytes
    read = room.answers()
    assert all(each["text"] == bytes(each["token_ids"]).decode(errors="replace") for each in read)

"""Bad fine-tuning data ends a run before its first step, and the error names the line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.workers.training.data.examples.templates import CHATML, write_tokenizer
from tests.workers.training.data.examples.test_run_examples import make_run, open_both, write
from workers.contracts.specs.model import ModelSource
from workers.runtime.exit_codes import UserError
from workers.training.data.pretrained_tokenizer import check_teacher_tokenizer


def chat(question: str, answer: str) -> dict[str, Any]:
    turns = (("user", question), ("assistant", answer))
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


GOOD, PAIR = chat("one", "1"), {"prompt": "a ", "chosen": "good", "rejected": "bad"}
RAISES = "{% if messages[0].content == 'bad' %}{{ raise_exception('no bad ones') }}{% endif %}"
DROPS = CHATML.replace("{{ message.content }}", "{{ message.content | replace('secret', '') }}")
FORGETS = CHATML.replace(
    "{{ message.content }}",
    "{% if message.role == 'assistant' and message.content != 'bad' %}{% generation %}"
    "{{ message.content }}{% endgeneration %}{% else %}{{ message.content }}{% endif %}",
)
PREFERENCES: dict[str, Any] = {"objective": "dpo", "dpo": {}}
CASES: dict[str, tuple[list[Any], str, dict[str, Any], str]] = {
    "a template that does not render": (
        [GOOD, chat("bad", "2")],
        "messages",
        {"sft": {"template": RAISES + CHATML}},
        "line 2: .*no bad ones",
    ),
    "a template that drops an answer": (
        [GOOD, GOOD, chat("two", "the secret")],
        "messages",
        {"sft": {"template": DROPS}},
        "line 3: .*drops text of the answer",
    ),
    "a sample without a trained token": (
        [GOOD, chat("two", "bad")],
        "messages",
        {"sft": {"template": FORGETS}},
        "line 2: .*marks 0 generated spans for 1 answers",
    ),
    "an empty answer": (
        [GOOD, chat("two", " ")],
        "messages",
        {},
        "line 2: messages.1 is an empty answer",
    ),
    "a pair without a common prompt": (
        [PAIR, {"chosen": "yes", "rejected": "no"}],
        "preference",
        PREFERENCES,
        "line 2: chosen and rejected have no common beginning",
    ),
    "a pair of equal answers": (
        [PAIR, {**PAIR, "rejected": "good"}],
        "preference",
        {"objective": "reward"},
        "line 2: chosen and rejected are equal",
    ),
    "a margin that is no number": (
        [PAIR, {**PAIR, "margin": "much"}],
        "preference",
        {"objective": "reward"},
        "line 2: margin is 'much'",
    ),
    "margins that are all missing": (
        [PAIR],
        "preference",
        {"objective": "reward", "reward": {"margin": True}},
        "train.reward.margin: no line has a margin",
    ),
    "labels of one kind": (
        [{"prompt": "a", "completion": "b", "label": True}] * 3,
        "labelled",
        {"objective": "dpo", "dpo": {"loss": "kto"}},
        "all 3 answers are labelled good",
    ),
    "a label that is a text": (
        [{"prompt": "a", "completion": "b", "label": "yes"}],
        "labelled",
        {"objective": "dpo", "dpo": {"loss": "kto"}},
        "line 1: label is 'yes'. Use true or false.",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_error_names_the_line(case: str, tmp_path: Path) -> None:
    lines, format_, train, message = CASES[case]
    tokenizer = write_tokenizer(tmp_path)
    data = {"path": write(tmp_path / "lines.jsonl", lines), "format": format_}
    run = make_run({**data, "tokenizer": str(tokenizer)}, **train)
    with pytest.raises(UserError, match=message):
        open_both(run, tmp_path)


def test_a_teacher_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    """Of the same size: another order of the tokens."""
    for name in ("run", "teacher"):
        (tmp_path / name).mkdir()
        write_tokenizer(tmp_path / name)
    teacher = ModelSource(path=str(tmp_path / "teacher"))
    check_teacher_tokenizer(teacher, checkpoints=tmp_path / "run")
    file = tmp_path / "teacher" / "tokenizer.json"
    document = json.loads(file.read_text())
    vocab = document["model"]["vocab"]
    first, second = list(vocab)[:2]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    file.write_text(json.dumps(document))
    with pytest.raises(
        UserError, match=r"train\.distill\.teacher: .*2 of 259 tokens have other ids"
    ):
        check_teacher_tokenizer(teacher, checkpoints=tmp_path / "run")

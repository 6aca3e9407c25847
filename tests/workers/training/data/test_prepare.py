"""The command that trains tokenizers and writes token files, as a run then reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.workers.training.data.test_sources import documents, ids, opened
from workers.training.data.prepare import main


def test_tokens_made_ahead_are_those_that_a_run_makes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "a.jsonl"
    text.write_text('{"text": "sein oder nicht sein"}\n{"text": "nicht sein"}\n' * 20)
    common = [str(text), "--format", "jsonl"]
    assert main(["tokenizer", *common, "--vocab", "270", "--out", str(tmp_path / "bpe")]) == 0
    shard = tmp_path / "shards" / "train.bin"
    assert main(["tokens", *common, "--tokenizer", str(tmp_path / "bpe"), "--out", str(shard)]) == 0
    assert '"tokens": ' in capsys.readouterr().out
    ahead = opened(tmp_path, 300, path=str(shard.parent), format="tokens")
    there = opened(tmp_path, 300, path=str(text), format="jsonl", tokenizer=str(tmp_path / "bpe"))
    assert ids(ahead) == ids(there) and documents(ahead) == documents(there)
    assert documents(ahead)[-1] == 40


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["tokenizer", "a.txt", "--vocab", "5", "--out", "x"],
            "vocab: 5 is out of range; it must be at least 257",
        ),
        (["tokens", "none.txt", "--out", "x.bin"], "none.txt does not exist"),
        (["tokens", "empty.txt", "--out", "x.bin"], "the files contain no text"),
        (["tokenizer", "a.txt", "--vocab", "300", "--out", "."], "already exists"),
    ],
)
def test_what_cannot_be_done_is_reported(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tokenizer.json").touch()
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "empty.txt").touch()
    assert main(arguments) == 64
    assert message in capsys.readouterr().err

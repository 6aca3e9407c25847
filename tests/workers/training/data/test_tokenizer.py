"""Tokenizers trained and loaded: text comes back whole, cuts change nothing, and one that does not
fit is refused.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers

from tests.workers.training.data.test_sources import documents, ids, opened
from workers.runtime.exit_codes import UserError
from workers.training.data.shards import description_path
from workers.training.data.tokenizer import check_same, load_tokenizer


def words(path: Path, vocab: dict[str, int]) -> Path:
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    path.parent.mkdir(exist_ok=True)
    made.save(str(path))
    return path


def test_a_trained_one_gives_text_back_and_is_the_same_each_time(tmp_path: Path) -> None:
    text = "Wahrlich, es grünt! \n\n  so <|endoftext|> sei es, sei es.\n" * 50
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for _ in range(3)))
    data = {"path": str(tmp_path / "a.jsonl"), "format": "jsonl", "tokenizer": {"vocab": 300}}
    first = opened(tmp_path / "1", 300, **data)
    stored = tmp_path / "1" / "kept" / "tokenizer.json"
    again = opened(tmp_path / "2", 300, **data)
    assert ids(first) == ids(again)
    assert stored.read_bytes() == (tmp_path / "2" / "kept" / "tokenizer.json").read_bytes()
    loaded = tokenizers.Tokenizer.from_file(str(stored))
    assert loaded.get_vocab_size() <= 300
    end = loaded.token_to_id("<|endoftext|>")
    result = ids(first)
    assert result.count(end) == 3, "text that spells the special token is text"
    assert len(result) < len(text.encode()) * 3 / 2, "pairs were merged"
    once = result[: result.index(end)]
    assert loaded.decode(once) == text
    assert documents(first)[: len(once) + 2] == [0] * len(once) + [1, 1]


def test_a_long_text_has_the_tokens_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workers.training.data import files

    text = "\n\n".join(f"ACT {n}\n   {'word ' * (n % 7)}\n\tend." for n in range(400))
    (tmp_path / "a.txt").write_text(text)
    data = {"path": str(tmp_path / "a.txt"), "tokenizer": {"vocab": 400}}
    whole = ids(opened(tmp_path / "whole", 400, **data))
    monkeypatch.setattr(files, "_CHUNK", 97)
    tokenizer = str(tmp_path / "whole" / "kept" / "tokenizer.json")
    assert ids(opened(tmp_path / "cut", 400, **{**data, "tokenizer": tokenizer})) == whole


def test_tokenized_once_and_made_again_when_unfinished(tmp_path: Path) -> None:
    path = words(tmp_path / "t" / "tokenizer.json", {"a": 0, "b": 1, "<unk>": 2, "</s>": 3})
    (tmp_path / "a.jsonl").write_text('{"text": "a b"}\n{"text": "b c"}\n')
    data = {"path": str(tmp_path / "a.jsonl"), "format": "jsonl", "tokenizer": str(path.parent)}
    assert ids(opened(tmp_path, **data)) == [0, 1, 3, 1, 2, 3]
    [written] = (tmp_path / "cache").glob("*.bin")
    stamp = written.stat().st_mtime_ns
    opened(tmp_path, **data)
    assert written.stat().st_mtime_ns == stamp
    description_path(written).unlink()  # what a process that was killed while writing leaves
    written.write_bytes(b"\0")
    assert ids(opened(tmp_path, **data)) == [0, 1, 3, 1, 2, 3]


def test_one_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    path = words(tmp_path / "tokenizer.json", {"a": 0, "b": 9, "<unk>": 2})
    with pytest.raises(UserError, match="token ids up to 9, the model's vocabulary has 9"):
        load_tokenizer(path, vocab=9)
    assert load_tokenizer(path, vocab=10).vocab == 10
    (tmp_path / "bad.json").write_text("{}")
    for file, message in (("bad.json", "is not a tokenizer.json"), ("none.json", "does not exist")):
        with pytest.raises(UserError, match=message):
            load_tokenizer(tmp_path / file, vocab=10)


def test_weights_that_were_made_with_another_are_refused(tmp_path: Path) -> None:
    weights = words(tmp_path / "weights" / "tokenizer.json", {"a": 0, "b": 1, "<unk>": 2}).parent
    same = words(tmp_path / "same" / "tokenizer.json", {"<unk>": 2, "b": 1, "a": 0})
    check_same(same, weights)
    check_same(same, tmp_path / "same.gguf")
    other = words(tmp_path / "other.json", {"a": 1, "b": 0, "<unk>": 2})
    with pytest.raises(
        UserError, match=r"2 of 3 tokens have other ids in .*weights, as 'a': 1, there 0"
    ):
        check_same(other, weights)
    (weights / "step-00000004").mkdir()
    (weights / "step-00000004" / "manifest.json").write_text("{}")
    with pytest.raises(UserError, match="other ids"):
        # a checkpoint next to the tokenizer that its run trained
        check_same(other, weights / "step-00000004")


def test_token_files_name_their_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a b"}\n')
    path = words(tmp_path / "tokenizer.json", {"a": 0, "b": 1, "<unk>": 2})
    opened(tmp_path, path=str(tmp_path / "a.jsonl"), format="jsonl", tokenizer=str(path))
    [shard] = (tmp_path / "cache").glob("*.bin")
    reported = {"path": str(shard), "format": "tokens"}
    assert ids(opened(tmp_path, **reported, tokenizer=str(path))) == [0, 1]
    other = words(tmp_path / "other.json", {"b": 0, "a": 1, "<unk>": 2})
    with pytest.raises(UserError, match="names another tokenizer"):
        opened(tmp_path, **reported, tokenizer=str(other))

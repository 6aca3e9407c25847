"""Token sources and their errors; samples and blocks as functions of the global sample index."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.training.conftest import make_spec
from workers.contracts.bodies import DataSpec
from workers.training import corpus as corpus_module
from workers.training.batches import IGNORED, Block, Samples, blocks_of, tensors_of
from workers.training.corpus import open_corpus, split_held_out
from workers.training.exits import UserError


def corpus(tmp_path, vocab=256, **data):
    return open_corpus(DataSpec.from_dict(data), vocab=vocab, cache=tmp_path / "cache")


def test_shakespeare_is_bytes_and_its_end_is_held_out(tmp_path):
    tokens = corpus(tmp_path, preset="shakespeare")
    assert len(tokens) > 1_000_000
    assert "HAMLET" in bytes(tokens).decode("ascii")
    sources = Path(corpus_module.__file__).parent / "corpora" / "SOURCES.md"
    assert hashlib.sha256(bytes(tokens)).hexdigest() in sources.read_text(), "the text is the one whose source is told"
    train, held = split_held_out(tokens)
    assert len(held) == len(tokens) // 10
    assert bytes(np.concatenate([train, held])) == bytes(tokens)


def test_text_jsonl_and_tokens(tmp_path):
    (tmp_path / "a.txt").write_text("naïve")
    assert bytes(corpus(tmp_path, path=str(tmp_path / "a.txt"))).decode() == "naïve"
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"text": "two"}\n')
    assert bytes(corpus(tmp_path, path=str(tmp_path / "a.jsonl"), format="jsonl")) == b"one\ntwo\n"
    for dtype, vocab in (("<u2", 50257), ("<u4", 128256)):
        np.array([1, 40000, 2], dtype).tofile(tmp_path / "a.bin")
        assert corpus(tmp_path, vocab, path=str(tmp_path / "a.bin"), format="tokens").tolist() == [1, 40000, 2]
    np.save(tmp_path / "a.npy", np.array([5, 6], "<u4"))
    assert corpus(tmp_path, path=str(tmp_path / "a.npy"), format="tokens").tolist() == [5, 6]


def test_tokenizer_file_ends_documents_and_is_asked_once(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"a": 0, "b": 1, "<unk>": 2, "</s>": 3}, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.jsonl").write_text('{"text": "a b"}\n{"text": "b c"}\n')
    data = {"path": str(tmp_path / "a.jsonl"), "format": "jsonl", "tokenizer": str(tmp_path / "tokenizer.json")}
    assert corpus(tmp_path, **data).tolist() == [0, 1, 3, 1, 2, 3]
    written = list((tmp_path / "cache").iterdir())
    assert len(written) == 1
    stamp = written[0].stat().st_mtime_ns
    corpus(tmp_path, **data)
    assert written[0].stat().st_mtime_ns == stamp


@pytest.mark.parametrize(
    ("name", "content", "format_", "says"),
    [
        ("missing.txt", None, "text", "does not exist"),
        ("latin.txt", b"x" * 1_048_575 + "é".encode("latin-1") + b"y", "text", "byte 0xe9 at offset 1048575"),
        ("cut.txt", b"ok" + "é".encode()[:1], "text", "at offset 2"),
        ("empty.txt", b"", "text", "is empty"),
        ("lines.jsonl", b'{"text": "a"}\n{"txt": "b"}\n', "jsonl", "line 2"),
        ("odd.bin", b"abc", "tokens", "3 bytes are no whole number of uint16"),
        ("bad.npy", b"abc", "tokens", "is no .npy array"),
    ],
)
def test_wrong_files_are_told(name, content, format_, says, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=says):
        corpus(tmp_path, path=str(tmp_path / name), format=format_)


def test_wrong_data_ends_a_run_by_a_sentence_on_every_rank(train, tmp_path):
    plan = {"dp": 2, "zero": 3, "micro_batch_size": 1}
    (tmp_path / "short.txt").write_text("too short")
    spec = {**make_spec(None, plan), "data": {"path": str(tmp_path / "short.txt")}}
    result = train(spec, tmp_path)
    assert [o["class"] for o in result.outcomes] == ["user_error"] * 2
    assert all("9 tokens are shorter than one sequence of 16 + 1" in o["reason"] for o in result.outcomes)


def test_ids_outside_the_vocabulary(train, tmp_path):
    np.full(1000, 300, "<u2").tofile(tmp_path / "a.bin")
    spec = {**make_spec(), "data": {"path": str(tmp_path / "a.bin"), "format": "tokens"}}
    outcome = train(spec, tmp_path).outcomes[0]
    assert outcome["class"] == "user_error"
    assert "token id 300" in outcome["reason"]


def test_an_epoch_sees_every_window_once_in_another_order():
    tokens = np.arange(41, dtype=np.uint16)
    samples = Samples(tokens, seq_len=4, vocab=64, seed=1, shuffle=True)
    epochs = [[int(samples.window(epoch * 10 + i)[0]) for i in range(10)] for epoch in (0, 1)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(0, 40, 4))
    assert epochs[0] != epochs[1]
    assert samples.window(3).tolist() == Samples(tokens, seq_len=4, vocab=64, seed=1, shuffle=True).window(3).tolist()
    assert [samples.window(i)[0] for i in range(10)] == epochs[0], "going back is the same as going on"


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 4), st.integers(0, 1000))
def test_blocks_cover_a_batch_once_under_any_dp(samples, micro, dp, first):
    by_rank = [blocks_of(first, samples, micro_batch_size=micro, dp=dp, rank=rank) for rank in range(dp)]
    assert len({len(blocks) for blocks in by_rank}) == 1, "ranks step together"
    covered = [block.first + i for blocks in by_rank for block in blocks for i in range(block.count)]
    assert sorted(covered) == list(range(first, first + samples))
    assert all(block.count + block.missing == micro for blocks in by_rank for block in blocks)
    alone = blocks_of(first, samples, micro_batch_size=micro, dp=1, rank=0)
    spread = sorted((b for blocks in by_rank for b in blocks if b.count), key=lambda b: b.first)
    assert spread == [b for b in alone if b.count], "the same groups, so that seeds by group are the same"


def test_padding_is_not_learned_from():
    samples = Samples(np.arange(41, dtype=np.uint16), seq_len=4, vocab=64, seed=1, shuffle=False)
    inputs, targets = tensors_of(samples, Block(2, 1, missing=1), torch.device("cpu"))
    assert inputs.tolist()[0] == [8, 9, 10, 11]
    assert targets.tolist() == [[9, 10, 11, 12], [IGNORED] * 4]

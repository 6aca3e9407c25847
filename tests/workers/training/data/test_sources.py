"""Every kind of source read through one door: what its tokens are, where documents begin, and what
is refused.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from workers.contracts.specs.data import DataSpec
from workers.runtime.exit_codes import UserError
from workers.training import data as data_package
from workers.training.data.sources import open_sources, open_tokenizer
from workers.training.data.stream import Stream


def open_all(tmp_path: Path, vocab: int = 256, **data: Any) -> list[Stream]:
    spec = DataSpec.from_dict(data)
    tokenizer = open_tokenizer(spec, vocab=vocab, checkpoints=tmp_path / "kept")
    return [
        source.stream
        for source in open_sources(spec, tokenizer=tokenizer, vocab=vocab, cache=tmp_path / "cache")
    ]


def opened(tmp_path: Path, vocab: int = 256, **data: Any) -> Stream:
    [stream] = open_all(tmp_path, vocab, **data)
    return stream


def ids(stream: Stream) -> list[int]:
    return stream.read(0, len(stream)).tolist()


def documents(stream: Stream) -> list[int]:
    return numbers(stream.documents(0, stream.read(0, len(stream))), len(stream))


def numbers(starts: list[int], length: int) -> list[int]:
    """Of each place the number of its document."""
    return [sum(start <= place for start in starts) - 1 for place in range(length)]


def test_shakespeare_is_bytes_and_its_end_is_held_out(tmp_path: Path) -> None:
    stream = opened(tmp_path, preset="shakespeare")
    whole = bytes(ids(stream))
    assert len(stream) > 1_000_000 and "HAMLET" in whole.decode("ascii")
    sources = Path(data_package.__file__).parents[1] / "corpora" / "SOURCES.md"
    assert hashlib.sha256(whole).hexdigest() in sources.read_text(), (
        "the text is the documented one"
    )
    train, held = stream.split()
    assert len(held) == len(stream) // 10
    assert bytes([*ids(train), *ids(held)]) == whole


def test_text_and_jsonl_as_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("naïve")
    assert bytes(ids(opened(tmp_path, path=str(tmp_path / "a.txt")))).decode() == "naïve"
    lines = ['{"text": "one\\n"}', "", '{"text": "tw\u2028o"}', '{"text": "é", "n": 1}']
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    stream = opened(tmp_path, path=str(tmp_path / "a.jsonl"), format="jsonl")
    assert bytes(ids(stream)).decode() == "one\n\ntw\u2028o\né\n"
    assert documents(stream) == [0] * 4 + [1] * 7 + [2] * 3 + [3], (
        "a separator stands before the next document"
    )


def test_a_folder_is_read_by_name_and_each_file_is_a_document(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, text in (("b.txt", "zwei"), ("a.txt", "eins"), ("c.md", "not this")):
        (folder / name).write_text(text)
    stream = opened(tmp_path, path=str(folder))
    assert bytes(ids(stream)) == b"einszwei" and documents(stream) == [0] * 4 + [1] * 4
    held = stream.split()[0]
    assert numbers(held.documents(2, held.read(2, 6)), 4) == [0, 0, 1, 1]


@pytest.mark.parametrize(("dtype", "vocab"), [("<u2", 50257), ("<u4", 128256)])
def test_token_files_of_other_programs(dtype: str, vocab: int, tmp_path: Path) -> None:
    tokens = [1, 40000, 2, 9, 3]
    folder = tmp_path / "shards"
    folder.mkdir()
    np.array(tokens, dtype).tofile(folder / "a.bin")
    header = np.zeros(256, "<i4")
    header[:3] = (20240520 if dtype == "<u2" else 20240801), 1, len(tokens)
    (folder / "b.bin").write_bytes(header.tobytes() + np.array(tokens, dtype).tobytes())
    np.save(folder / "c.npy", np.array(tokens, dtype))
    stream = opened(tmp_path, vocab, path=str(folder), format="tokens", document_end=9)
    assert ids(stream) == tokens * 3
    assert documents(stream) == [0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 3, 3]
    assert stream.read(3, 12).tolist() == (tokens * 3)[3:12], "across files"
    assert not opened(tmp_path, vocab, path=str(folder), format="tokens").knows_documents


def test_sources_keep_their_weights_names_and_order(tmp_path: Path) -> None:
    (tmp_path / "my notes.txt").write_text("abc")
    spec = DataSpec.from_dict(
        {
            "sources": [
                {"preset": "shakespeare", "weight": 3},
                {"path": str(tmp_path / "my notes.txt")},
            ]
        }
    )
    tokenizer = open_tokenizer(spec, vocab=256, checkpoints=tmp_path)
    result = open_sources(spec, tokenizer=tokenizer, vocab=256, cache=tmp_path)
    assert [(each.name, each.weight) for each in result] == [
        ("shakespeare", 3.0),
        ("my_notes", 1.0),
    ]


@pytest.mark.parametrize(
    ("name", "content", "format_", "message"),
    [
        ("missing.txt", None, "text", "does not exist"),
        (
            "latin.txt",
            b"x" * 1_048_575 + "é".encode("latin-1") + b"y",
            "text",
            "byte 0xe9 at offset 1048575",
        ),
        ("cut.txt", b"ok" + "é".encode()[:1], "text", "at offset 2"),
        ("empty.txt", b"", "text", "is empty"),
        (
            "lines.jsonl",
            b'{"text": "a"}\n\n{"txt": "b", "n": 1}\n',
            "jsonl",
            "line 3 .* it has the fields txt, n",
        ),
        ("broken.jsonl", b'{"text": "a"}\n{"text": "b\n', "jsonl", "line 2 is not JSON"),
        (
            "latin.jsonl",
            b'{"text": "a"}\n{"text": "\xe9"}\n',
            "jsonl",
            "line 2: byte 0xe9 at its offset 10",
        ),
        (
            "chat.jsonl",
            b'{"messages": []}\n',
            "jsonl",
            "line 1 is a conversation .* Use train.objective sft",
        ),
        ("blank.jsonl", b"\n\n", "jsonl", "the files contain no text"),
        ("odd.bin", b"abc", "tokens", "3 bytes are not a multiple of uint16"),
        ("none.bin", b"", "tokens", "is empty"),
        ("bad.npy", b"abc", "tokens", "is not an .npy array"),
    ],
)
def test_wrong_files_are_reported(
    name: str, content: bytes | None, format_: str, message: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        opened(tmp_path, path=str(tmp_path / name), format=format_)


@pytest.mark.parametrize(
    ("reported", "message"),
    [
        ({"tokens": 9}, "holds 4 tokens, a.bin.json has 9"),
        ({"dtype": "uint32", "tokens": 3}, "holds 2 tokens, a.bin.json has 3"),
        ({"dtype": "float16"}, "has dtype float16"),
        ({"vocab": 257}, "its tokenizer has 257 tokens, the model's vocabulary 256"),
        (
            {"tokens": 4, "starts": "a.npy"},
            "names a.npy for document starts, which cannot be read",
        ),
    ],
)
def test_a_description_that_does_not_fit_its_file(
    reported: dict[str, Any], message: str, tmp_path: Path
) -> None:
    np.array([1, 2, 3, 4], "<u2").tofile(tmp_path / "a.bin")
    (tmp_path / "a.bin.json").write_text(json.dumps(reported))
    with pytest.raises(UserError, match=message):
        opened(tmp_path, path=str(tmp_path / "a.bin"), format="tokens")


def test_cut_files_of_tokens(tmp_path: Path) -> None:
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, 1000
    (tmp_path / "a.bin").write_bytes(header.tobytes() + bytes(1998))
    with pytest.raises(UserError, match="holds 999 tokens, its header has 1000"):
        opened(tmp_path, path=str(tmp_path / "a.bin"), format="tokens")
    np.save(tmp_path / "a.npy", np.zeros(1000, "<u2"))
    (tmp_path / "a.npy").write_bytes((tmp_path / "a.npy").read_bytes()[:-10])
    with pytest.raises(UserError, match=r"is not an .npy array"):
        opened(tmp_path, path=str(tmp_path / "a.npy"), format="tokens")

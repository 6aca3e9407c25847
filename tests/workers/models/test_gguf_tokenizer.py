"""The tokenizer inside a GGUF file: the ids of the tokenizer it was written from, its special
tokens and template.
"""

from __future__ import annotations

import inspect
import json
import random
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX as QWEN2

from workers.models.errors import WeightsError
from workers.models.gguf.header import GgufHeader
from workers.models.gguf.tokenizer import tokenizer_files
from workers.models.text.assets import read_assets
from workers.models.text.tokenizer import open_tokenizer

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
TEXT = (
    "It's 1234 o'clock, DON'T panic!\r\n\n\tWärst  du   da? – naïve e\u0301clair ☃ 中文 "
    "for(i=0;i<10;++i){}\n  \n"
)
TEMPLATE = (
    "{% for message in messages %}{% if message.role not in ['user', 'assistant'] %}{{ "
    "raise_exception('who?') }}"
    "{% endif %}<|begin|>{{ message['role'] }}\n{% generation %}{{ message['content'] }}{% "
    "endgeneration %}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|begin|>assistant\n{% endif %}"
)
LLAMA3 = inspect.signature(TikTokenConverter.__init__).parameters["pattern"].default


def byte_level(*before: Any, regex: bool = True) -> Any:
    return pre_tokenizers.Sequence(
        [*before, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex)]
    )


WAYS: dict[str, Callable[[], Any]] = {
    "gpt-2": byte_level,
    "smollm": lambda: byte_level(pre_tokenizers.Digits(individual_digits=True)),
    "llama-bpe": lambda: byte_level(pre_tokenizers.Split(Regex(LLAMA3), "isolated"), regex=False),
    "qwen2": lambda: byte_level(pre_tokenizers.Split(Regex(QWEN2), "isolated"), regex=False),
}


def trained(way: str) -> Any:
    """A byte-level BPE as its users train one, ids of special tokens first."""
    made = tokenizers.Tokenizer(models.BPE(ignore_merges=way == "llama-bpe"))
    made.pre_tokenizer, made.decoder = WAYS[way](), decoders.ByteLevel()
    made.normalizer = normalizers.NFC() if way == "qwen2" else None
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|endoftext|>", "<|begin|>", "<|end|>"],
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    made.train_from_iterator([TEXT * 3, "for the clock to begin 1234 12 34\n" * 5], trainer)
    return made


def values_of(made: Any, way: str, *, more: tuple[tuple[str, int], ...] = ()) -> dict[str, Any]:
    """What llama.cpp's converter writes of it."""
    model = json.loads(made.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    kinds = [CONTROL if token.startswith("<|") else NORMAL for token in tokens]
    return {
        "model": "gpt2",
        "pre": way,
        "tokens": [*tokens, *(token for token, _ in more)],
        "token_type": [*kinds, *(kind for _, kind in more)],
        "merges": [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "eot_token_id": 0,
        "padding_token_id": 2,
    }


def in_memory(values: dict[str, Any], **extra: Any) -> GgufHeader:
    prefixed = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    return GgufHeader(
        Path("model.gguf"), {"general.architecture": "llama", **prefixed, **extra}, {}
    )


def written(path: Path, values: dict[str, Any]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_chat_template(TEMPLATE)
    for key, value in values.items():
        name = f"tokenizer.ggml.{key}"
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, int) and not isinstance(value, bool):
            writer.add_uint32(name, value)
        else:
            writer.add_bool(name, value) if isinstance(value, bool) else writer.add_string(
                name, value
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("way", WAYS)
def test_ids_of_the_one_it_was_written_from(way: str, tmp_path: Path) -> None:
    made = trained(way)
    path = written(
        tmp_path / "model.gguf",
        values_of(made, way, more=(("<think>", USER), ("[PAD421]", UNUSED))),
    )
    ours = open_tokenizer(path)
    draw = random.Random(way)
    for text in [TEXT, *("".join(draw.choices(TEXT, k=60)) for _ in range(200))]:
        ids = ours.encode(text, special=False)
        assert ids == made.encode(text).ids
        assert ours.decode(ids) == (
            made.normalizer.normalize_str(text) if made.normalizer else text
        )
    size = made.get_vocab_size()
    assert (ours.vocab, ours.bos, ours.ends) == (size + 1, 1, (2, 0)), (
        "rows that only fill the table are no tokens"
    )
    assert ours.encode("a<think>b", special=False)[1] == size
    assert (ours.encode("a")[0] == 1) == (way == "llama-bpe"), "where no key says, the kind does"


def test_what_transformers_reads_is_the_same(tmp_path: Path) -> None:
    made = trained("smollm")
    path = written(tmp_path / "model.gguf", {**values_of(made, "smollm"), "add_bos_token": True})
    for name, data in read_assets(path).items():
        (tmp_path / name).write_bytes(data)
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), open_tokenizer(path)
    output = [
        {"role": "user", "content": "It's  1234?"},
        {"role": "assistant", "content": "Yes.\n"},
    ]
    assert theirs(TEXT)["input_ids"] == ours.encode(TEXT)
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (1, 2, 2)
    for answer in (True, False):
        rendered = ours.chat(output, answer=answer)
        assert rendered == theirs.apply_chat_template(
            output, tokenize=False, add_generation_prompt=answer
        )
        assert ours.decode(ours.encode(rendered, special=False), special=True) == rendered
    with pytest.raises(WeightsError, match=r"its chat template refuses: who\?"):
        ours.chat([{"role": "system", "content": ""}])


def test_without_torch(tmp_path: Path) -> None:
    path = written(tmp_path / "model.gguf", values_of(trained("gpt-2"), "gpt-2"))
    code = (
        "import sys; from pathlib import Path; "
        "from workers.models.text.tokenizer import open_tokenizer;"
        f"open_tokenizer(Path({str(path)!r})).encode('a'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


PIECES = [
    "▁t",
    "he",
    "▁the",
    "▁a",
    "er",
    "▁th",
    "in",
    "▁o",
    "re",
    "▁he",
    "ing",
    "the",
    "▁there",
    "▁in",
    "▁ther",
    "▁▁",
]
ALPHABET = [*"▁theraino1.", "g"]
SCORED = {
    **{piece: -float(rank) for rank, piece in enumerate(PIECES)},
    **{c: -100.0 - n for n, c in enumerate(ALPHABET)},
}


def pieces_file() -> GgufHeader:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *SCORED]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(SCORED)]
    scores = [0.0] * 259 + list(SCORED.values())
    special = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return in_memory(
        {"model": "llama", "tokens": tokens, "token_type": kinds, "scores": scores, **special}
    )


def sentence_pieces(text: str) -> list[str]:
    """SentencePiece's way: of all neighbors join those that make the best piece, leftmost first,
    until none do.
    """
    symbols = list("▁" + text.replace(" ", "▁"))
    while True:
        joined = [(-SCORED.get(a + b, -1e9), at) for at, (a, b) in enumerate(pairwise(symbols))]
        cost, at = min(joined, default=(1e9, 0))
        if cost >= 1e9:
            break
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    known = [
        [symbol] if symbol in SCORED else [f"<0x{byte:02X}>" for byte in symbol.encode()]
        for symbol in symbols
    ]
    return [piece for group in known for piece in group]


LOADED = tokenizers.Tokenizer.from_str(tokenizer_files(pieces_file())["tokenizer.json"])


@given(st.text(alphabet="therain o1.gé☃", max_size=40).filter(bool))
def test_sentence_pieces(text: str) -> None:
    result = LOADED.encode(text, add_special_tokens=False)
    assert result.tokens == sentence_pieces(text)
    assert LOADED.decode(result.ids) == text
    assert LOADED.encode(text).ids == [1, *result.ids]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"pre": "default"},
            "uses the pre-tokenizer 'default'; known are .*smollm",
        ),
        ({"model": "t5"}, "is of the kind 't5'; gpt2"),
        ({"merges": None}, "has no merges"),
        ({"merges": ["ab"]}, "a merge that is not a pair"),
        ({"token_type": [1]}, "tokens and 1 types"),
        ({"eos_token_id": 9999}, "has eos_token_id 9999 and"),
        ({"tokens": ["a"] * 420, "token_type": [1] * 420}, "has the token 'a' twice"),
        (
            {
                "tokens": ["\udc80"],
                "token_type": [1],
                "bos_token_id": 0,
                "eos_token_id": 0,
                "padding_token_id": 0,
            },
            "a token that is not UTF-8",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_read_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        tokenizer_files(in_memory({**values_of(trained("gpt-2"), "gpt-2"), **change}))


def test_several_templates_none_and_a_tokenizer_carried_whole() -> None:
    values = values_of(trained("gpt-2"), "gpt-2")
    extra = {
        "tokenizer.huggingface.json": '{"whole": 1}',
        "tokenizer.chat_template": "one",
        "tokenizer.chat_templates": ["tools"],
        "tokenizer.chat_template.tools": "two",
    }
    files = tokenizer_files(in_memory(values, **extra))
    assert files["tokenizer.json"] == '{"whole": 1}'
    reported = json.loads(files["tokenizer_config.json"])["chat_template"]
    assert reported == [
        {"name": "default", "template": "one"},
        {"name": "tools", "template": "two"},
    ]
    assert tokenizer_files(GgufHeader(Path("x"), {}, {})) == {}

"""Training from a GGUF file: its own tokenizer reads the text, goes out with the export, and no
other may read it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests.workers.models.test_gguf import gguf, write
from tests.workers.models.test_gguf_tokenizer import trained, values_of
from tests.workers.models.test_hugging_face import decoder_of, their_model
from tests.workers.training.conftest import make_spec
from workers.models.convert import main
from workers.runtime.exit_codes import UserError
from workers.training.data.run_samples import open_samples
from workers.training.setup.spec_loading import accept

WORDS = "for the clock to begin at 12 or 34,\nit's DON'T panic again: o'clock\n\n"
SHAPE = {
    "layers": 2,
    "hidden": 32,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 48,
    "max_seq_len": 64,
    "rope": {"theta": 1e4},
}
THEIRS = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
BPE = trained("smollm")
VOCAB = BPE.get_vocab_size() + 5  # rows beyond the tokens, as published models have


@pytest.fixture(scope="module")
def room(tmp_path_factory) -> Path:
    """A model and its tokenizer in one file, and a text."""
    room = tmp_path_factory.mktemp("inherited")
    (room / "text.txt").write_text(WORDS * 60)
    torch.manual_seed(5)
    write_model(room / "model.gguf", "smollm")
    return room


def write_model(path: Path, way: str) -> Path:
    fill = tuple((f"[PAD{number}]", 5) for number in range(5))
    values = values_of(BPE, way, more=fill)

    def also(writer: Any) -> None:
        for key, value in values.items():
            name = f"tokenizer.ggml.{key}"
            add = writer.add_array if isinstance(value, list) else writer.add_string
            writer.add_uint32(name, value) if isinstance(value, int) else add(name, value)

    model = their_model("Llama", {**THEIRS, "vocab_size": VOCAB})
    return write(model, path, gguf.GGMLQuantizationType.F32, also=also)


def spec(
    room: Path, source: Path, plan: dict[str, Any] | None = None, **train: Any
) -> dict[str, Any]:
    batch = {"micro_batch_size": 2, "global_batch_size": 4, **(plan or {})}
    shape = {**SHAPE, "vocab": VOCAB, "tie_embeddings": True}
    made = make_spec(shape, batch, **{"steps": 3, "init_from": {"path": str(source)}, **train})
    return {**made, "data": {"path": str(room / "text.txt")}}


def test_import_train_export_reload_resume(room, train, tmp_path):
    first = train(
        spec(room, room / "model.gguf", checkpoint={"every_steps": 3}), tmp_path / "first"
    )
    reported = next(event["data"] for event in first.events() if event["type"] == "weights_loaded")
    assert reported["tokenizer"] == str(tmp_path / "first" / "checkpoints" / "tokenizer.json")
    pair = train(
        spec(room, room / "model.gguf", {"dp": 2, "zero": 3, "micro_batch_size": 1}),
        tmp_path / "pair",
    )
    assert pair.values("loss") == pytest.approx(first.values("loss"), rel=1e-5)

    exported = tmp_path / "exported"
    assert main([str(tmp_path / "first"), str(exported)]) == 0
    theirs = AutoTokenizer.from_pretrained(exported)
    ids = BPE.encode(WORDS).ids
    assert theirs(WORDS)["input_ids"] == ids and theirs.decode(ids) == WORDS
    model = AutoModelForCausalLM.from_pretrained(exported).eval()
    with torch.no_grad():
        logits = model(torch.tensor([ids[:40]])).logits
        ours = decoder_of(tmp_path / "first" / "checkpoints")(torch.tensor([ids[:40]]))
    torch.testing.assert_close(ours, logits, atol=1e-4, rtol=0)
    assert (
        model.config.eos_token_id
        == GenerationConfig.from_pretrained(exported).eos_token_id
        == [2, 0]
    )

    onward = train(spec(room, exported), tmp_path / "onward")
    from_checkpoint = train(spec(room, tmp_path / "first"), tmp_path / "from checkpoint")
    assert onward.values("loss") == pytest.approx(from_checkpoint.values("loss"), rel=1e-6)
    assert onward.values("loss")[-1] < first.values("loss")[0]


def opened(document: dict[str, Any], folder: Path) -> Any:
    return open_samples(accept(document), cache=folder / "cache", checkpoints=folder / "kept")[0]


def test_a_tokenizer_that_is_not_the_weights_is_refused(room, tmp_path):
    other = json.loads(BPE.to_str())
    vocab = other["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (tmp_path / "other.json").write_text(json.dumps(other))
    (tmp_path / "same.json").write_text(BPE.to_str())
    (tmp_path / "wide.json").write_text(
        json.dumps(
            {
                **other,
                "added_tokens": [],
                "model": {**other["model"], "vocab": {**vocab, "xyz": 9999}},
            }
        )
    )
    strange = write_model(tmp_path / "strange.gguf", "default")
    for tokenizer, source, message in (
        (
            "bytes",
            "model.gguf",
            r"bytes were requested, but .*model\.gguf has a tokenizer\.json\. Omit data\.tokenizer",
        ),
        (
            str(tmp_path / "other.json"),
            "model.gguf",
            "2 of .* tokens have other ids in the tokenizer.json of .*gguf",
        ),
        (
            str(tmp_path / "wide.json"),
            "model.gguf",
            "token ids up to 9999, the model's vocabulary has",
        ),
        (None, strange, r"train\.init_from: .*uses the pre-tokenizer 'default'"),
    ):
        document = spec(room, room / source)
        document["data"] |= {"tokenizer": tokenizer} if tokenizer else {}
        with pytest.raises(UserError, match=message):
            opened(document, tmp_path / "run")
    helped = spec(room, strange)
    helped["data"] |= {"tokenizer": str(tmp_path / "same.json")}
    opened(helped, tmp_path / "c")
    assert (tmp_path / "c" / "kept" / "tokenizer.json").read_text() == BPE.to_str()
    named = spec(room, room / "model.gguf")
    named["data"] |= {"tokenizer": str(tmp_path / "same.json")}
    inherited = opened(spec(room, room / "model.gguf"), tmp_path / "b").window(0)
    assert inherited.tolist() == opened(named, tmp_path / "a").window(0).tolist()
    assert (tmp_path / "a" / "kept" / "tokenizer.json").is_file(), "an export takes it from there"


def test_text_is_never_read_as_bytes_unasked(room, tmp_path):
    bare = tmp_path / "bare"
    their_model("Llama", {**THEIRS, "vocab_size": VOCAB}).save_pretrained(bare)
    with pytest.raises(
        UserError, match=r"bare has no tokenizer\.json; text would be read as bytes"
    ):
        opened(spec(room, bare), tmp_path / "run")
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        UserError, match=r"train\.init_from: .*empty contains neither a config\.json"
    ):
        opened(spec(room, tmp_path / "empty"), tmp_path / "run")
    requested = spec(room, bare)
    requested["data"]["tokenizer"] = "bytes"
    made = tmp_path / "made" / "step-00000001"  # by a run on bytes, as its manifest says
    made.mkdir(parents=True)
    (made / "manifest.json").write_text(
        json.dumps({"version": 1, "spec": {"data": {"preset": "shakespeare"}}})
    )
    for document in (requested, spec(room, made.parent)):
        window = opened(document, tmp_path / "run").window(0)
        assert bytes(window.tolist()).decode() in WORDS * 2


def test_a_run_that_has_begun_needs_its_weights_no_more(room, train, tmp_path):
    """Their folder is still there, and empty."""
    weights = tmp_path / "weights"
    weights.mkdir()
    shutil.copy(room / "model.gguf", weights)
    train(spec(room, weights, steps=2, checkpoint={"every_steps": 2}), tmp_path / "run")
    (weights / "model.gguf").unlink()
    [outcome] = train(spec(room, weights, steps=3), tmp_path / "run").outcomes
    assert (outcome["class"], outcome["step"]) == ("ok", 3), outcome


def test_token_files_of_another_tokenizer_are_refused(room, tmp_path):
    import numpy as np

    np.arange(200, dtype=np.uint16).tofile(tmp_path / "t.bin")
    (tmp_path / "t.bin.json").write_text(
        json.dumps({"dtype": "uint16", "tokens": 200, "tokenizer": "ab" * 32})
    )
    document = spec(room, room / "model.gguf")
    document["data"] = {"path": str(tmp_path / "t.bin"), "format": "tokens"}
    with pytest.raises(UserError, match="names another tokenizer"):
        opened(document, tmp_path / "run")

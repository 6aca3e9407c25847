"""Adapters of GPT-2, whose queries, keys and values are one layer in PEFT's files."""

from __future__ import annotations

import json

import pytest
import torch

from workers.contracts.specs.finetuning.adapters import AdapterSpec
from workers.contracts.specs.model import ModelSpec
from workers.models.adapters.apply import apply_adapter
from workers.models.adapters.merged import MergedWeights
from workers.models.adapters.peft_config import CONFIG
from workers.models.adapters.peft_files import fingerprint, read_adapter, write_adapter
from workers.models.decoder import Decoder
from workers.models.errors import WeightsError
from workers.models.hf.saving import save_hugging_face
from workers.models.initialize import initialize
from workers.models.weights.open import open_weights
from workers.models.weights.reader import fill_model

GPT2 = ModelSpec.from_dict(
    {
        "name": "gpt2-tiny",
        "layers": 2,
        "hidden": 32,
        "heads": 4,
        "ffn": 64,
        "vocab": 96,
        "max_seq_len": 32,
        "gated_mlp": False,
        "activation": "gelu_tanh",
        "norm": "layernorm",
        "position": "learned",
        "bias": "all",
        "tie_embeddings": True,
    }
)
ADAPTERS = {
    "lora": {"method": "lora", "rank": 4},
    "two parts": {"method": "lora", "rank": 4, "targets": ["q", "v", "o"]},
    "one part": {"method": "rslora", "rank": 4, "targets": ["v"]},
    "rslora": {"method": "rslora", "rank": 4, "targets": ["q", "k", "v"]},
    "dora": {"method": "dora", "rank": 4},
    "ia3": {"method": "ia3"},
}
TOKENS = torch.arange(12)[None] * 7 % 96


class Stored:
    """A decoder's weights."""

    where = "memory"

    def __init__(self, decoder):
        self.spec, self.tensors = decoder.spec, dict(decoder.named_parameters())

    def read(self, name):
        return self.tensors[name].detach()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder, decoder = tmp_path_factory.mktemp("base"), Decoder(GPT2)
    initialize(decoder, layers=2, seed=1)
    save_hugging_face(Stored(decoder), folder)
    return open_weights(folder)


def adapted(base, adapter):
    """A decoder with the adapter's parameters drawn at random."""
    with torch.device("meta"):
        decoder = Decoder(base.spec)
    apply_adapter(decoder, adapter)
    decoder.to_empty(device="cpu")
    initialize(decoder, layers=2, seed=2)
    fill_model(decoder, base)
    generator = torch.Generator().manual_seed(3)
    added = {
        name: each
        for name, each in decoder.named_parameters()
        if name.rpartition(".")[2] in ("lora_A", "lora_B", "lora_magnitude", "ia3_l")
    }
    with torch.no_grad():
        for each in added.values():
            noise = torch.empty(each.shape).normal_(0, 0.3, generator=generator)
            each.add_(noise)
        return decoder.eval(), added, decoder(TOKENS)


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_joined_layer_is_written_and_read(name, base, tmp_path):
    adapter = AdapterSpec.from_dict(ADAPTERS[name])
    _, added, expected = adapted(base, adapter)
    write_adapter(
        tmp_path,
        added,
        adapter=adapter,
        model=base.spec,
        base=base.where,
        fingerprint=fingerprint(base),
    )
    config = json.loads((tmp_path / CONFIG).read_text())
    assert config["fan_in_fan_out"] is True
    merged = MergedWeights(base, read_adapter(tmp_path, base.spec))
    decoder = Decoder(merged.spec).eval()
    fill_model(decoder, merged)
    with torch.no_grad():
        torch.testing.assert_close(decoder(TOKENS), expected, rtol=1e-5, atol=1e-5)


def test_pefts_own_ranks_of_a_joined_layer(base, tmp_path):
    adapter = AdapterSpec.from_dict(ADAPTERS["two parts"])
    _, added, _ = adapted(base, adapter)
    write_adapter(
        tmp_path, added, adapter=adapter, model=base.spec, base=base.where, fingerprint=None
    )
    config = json.loads((tmp_path / CONFIG).read_text())
    assert config["r"] == 4 and config["lora_alpha"] == 8
    assert config["rank_pattern"] == {f"transformer.h.{n}.attn.c_attn": 8 for n in range(2)}
    assert config["alpha_pattern"] == {f"transformer.h.{n}.attn.c_attn": 16 for n in range(2)}
    tensors = read_adapter(tmp_path, base.spec).low_rank
    assert tensors["blocks.0.attn.k"].b.abs().max() == 0


def test_magnitudes_of_some_parts_only_cannot_be_written(base, tmp_path):
    adapter = AdapterSpec(method="dora", rank=2, targets=["q"])
    _, added, _ = adapted(base, adapter)
    with pytest.raises(WeightsError, match="adapt q, k and v, or none"):
        write_adapter(
            tmp_path, added, adapter=adapter, model=base.spec, base=base.where, fingerprint=None
        )


def test_a_model_without_a_hugging_face_family_has_our_names(tmp_path):
    decoder = Decoder(ModelSpec.from_dict({**GPT2.to_dict(), "logit_softcap": 30.0}))
    initialize(decoder, layers=2, seed=1)
    stored, adapter = Stored(decoder), AdapterSpec(method="lora", rank=2)
    _, added, expected = adapted(stored, adapter)
    write_adapter(
        tmp_path, added, adapter=adapter, model=stored.spec, base="memory", fingerprint=None
    )
    merged, plain = MergedWeights(stored, read_adapter(tmp_path, stored.spec)), Decoder(stored.spec)
    fill_model(plain.eval(), merged)
    with torch.no_grad():
        torch.testing.assert_close(plain(TOKENS), expected, rtol=1e-5, atol=1e-5)

"""PEFT's files are read as PEFT computes them, written as PEFT writes them, and checked."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.workers.models.adapters import golden
from workers.contracts.catalog.adapter_shapes import adapter_shapes
from workers.contracts.specs.finetuning.adapters import AdapterSpec
from workers.models.adapters.apply import apply_adapter
from workers.models.adapters.merged import MergedWeights
from workers.models.adapters.nf4 import quantize_nf4
from workers.models.adapters.peft_config import CONFIG, TENSORS
from workers.models.adapters.peft_files import read_adapter, write_adapter
from workers.models.adapters.prompt import Prompt
from workers.models.decoder import Decoder
from workers.models.errors import WeightsError
from workers.models.weights.open import open_weights
from workers.models.weights.reader import fill_model

LOGITS = json.loads((golden.FOLDER / "logits.json").read_text())
NF4 = json.loads((golden.FOLDER / "nf4.json").read_text())
MERGED = ("lora", "rslora", "dora", "embedding", "ia3")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    golden.base(folder)
    return open_weights(folder)


def logits(weights):
    decoder = Decoder(weights.spec).eval()
    fill_model(decoder, weights)
    with torch.no_grad():
        return decoder(torch.tensor(golden.TOKENS))[0, :, :8]


@pytest.mark.parametrize("method", MERGED)
def test_merged_weights_compute_pefts_logits(method, base):
    merged = MergedWeights(base, read_adapter(golden.FOLDER / method, base.spec))
    expected = torch.tensor(LOGITS[method])
    torch.testing.assert_close(logits(merged), expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(logits(base), expected, atol=1e-3)
    assert merged.error().relative == 0


@pytest.mark.parametrize("method", ["prompt", "p_tuning", "prefix"])
def test_virtual_tokens_compute_pefts_logits(method, base):
    read = read_adapter(golden.FOLDER / method, base.spec)
    decoder = Decoder(base.spec).eval()
    # PEFT's file of P-tuning has the encoder's outputs, which are a prompt
    kind = "prefix" if method == "prefix" else "prompt"
    apply_adapter(decoder, AdapterSpec(method=kind, rank=3, init="random"))
    fill_model(decoder, base)
    with torch.no_grad():
        if method == "prefix":
            width = base.spec.kv_heads * base.spec.head_dim
            parts = read.prompt.split(width, dim=1)
            for layer, block in decoder.blocks.items():
                block.attn.prefix_k.copy_(parts[2 * int(layer)].T)
                block.attn.prefix_v.copy_(parts[2 * int(layer) + 1].T)
        else:
            decoder.prompt.embedding.copy_(read.prompt)
        out = decoder(torch.tensor(golden.TOKENS))[0, :, :8]
    torch.testing.assert_close(out, torch.tensor(LOGITS[method]), rtol=1e-5, atol=1e-5)
    with pytest.raises(WeightsError, match="cannot be merged"):
        MergedWeights(base, read)


def test_p_tuning_writes_its_encoders_outputs(base, tmp_path):
    torch.manual_seed(2)
    adapter = AdapterSpec(method="p_tuning", rank=3)
    shapes = adapter_shapes(base.spec, adapter)
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    where = {"model": base.spec, "base": base.where, "fingerprint": None}
    write_adapter(tmp_path, tensors, adapter=adapter, **where)
    prompt = Prompt(adapter, base.spec.hidden)
    prompt.load_state_dict({n.removeprefix("prompt."): t for n, t in tensors.items()})
    written = read_adapter(tmp_path, base.spec).prompt
    virtual = prompt(torch.zeros(1, 1, base.spec.hidden))[0, :3]
    torch.testing.assert_close(written, virtual.detach())


def changed(tmp_path, method="lora", config=None, tensors=None):
    folder = tmp_path / "changed"
    shutil.copytree(golden.FOLDER / method, folder)
    document = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**document, **(config or {})}))
    if tensors is not None:
        save_file(tensors(load_file(folder / TENSORS)), folder / TENSORS)
    return folder


KEY = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({"layer_replication": [[0, 2]]}, None, "layer_replication"),
        ({"init_lora_weights": "pissa"}, None, "pissa"),
        ({"peft_type": "VERA"}, None, "VERA"),
        ({"use_dora": True}, None, "use_dora disagree"),
        ({}, lambda t: {**t, KEY: t[KEY][:, :32].contiguous()}, r"\[4, 32\]"),
        ({}, lambda t: {**t, KEY: t[KEY] * float("nan")}, "not finite"),
        ({}, lambda t: {k: v for k, v in t.items() if k != KEY}, "has no .*lora_A"),
        ({}, lambda t: {**t, KEY.replace("0", "7"): t[KEY].clone()}, "layers.7"),
        ({}, lambda t: {**t, "base_model.model.extra.weight": t[KEY].clone()}, "no place for"),
    ],
)
def test_a_file_that_would_change_results_silently_is_refused(
    config, tensors, message, base, tmp_path
):
    with pytest.raises(WeightsError, match=message):
        read_adapter(changed(tmp_path, config=config, tensors=tensors), base.spec)


def test_a_base_that_is_not_here_is_named(tmp_path):
    folder = changed(tmp_path, config={"base_model_name_or_path": "example/absent"})
    with pytest.raises(WeightsError, match="example/absent, which is not on this machine"):
        open_weights(folder)


def test_an_adapters_folder_opens_as_merged_weights(base, tmp_path):
    folder = changed(tmp_path, config={"base_model_name_or_path": base.where})
    assert isinstance(open_weights(folder), MergedWeights)
    torch.testing.assert_close(
        logits(open_weights(folder)), torch.tensor(LOGITS["lora"]), rtol=1e-5, atol=1e-5
    )


def test_nf4_is_bitsandbytes():
    torch.manual_seed(5)
    weight = torch.randn(8, 128) * 0.02
    single, double = quantize_nf4(weight, double=False), quantize_nf4(weight, double=True)
    assert single.codes.flatten().tolist() == NF4["codes"]
    assert single.scales.flatten().tolist() == pytest.approx(NF4["absmax"])
    torch.testing.assert_close(
        single.dequantize(torch.float32)[0], torch.tensor(NF4["dequantized"])
    )
    more = NF4["double"]
    # bitsandbytes' kernel for CPUs takes the neighbor of one code that lies near a midpoint
    steps = (double.scales.flatten().int() - torch.tensor(more["codes"])).abs()
    assert int(steps.max()) <= 1 and int(steps.sum()) <= 1
    assert double.groups.tolist() == pytest.approx(more["scales"])
    assert float(double.mean) == pytest.approx(more["mean"])
    torch.testing.assert_close(
        double.dequantize(torch.float32)[0], torch.tensor(more["dequantized"])
    )


def test_nf4_of_normal_weights_has_the_known_error():
    torch.manual_seed(0)
    weight = torch.randn(1024, 1024) * 0.02
    restored = quantize_nf4(weight, double=True).dequantize(torch.float32)
    assert float((restored - weight).norm() / weight.norm()) == pytest.approx(0.092, abs=5e-4)
    stored = quantize_nf4(weight, double=True)
    sizes = [each.nbytes for each in (stored.codes, stored.scales, stored.groups, stored.mean)]
    assert 8 * sum(sizes) / weight.numel() == pytest.approx(4.127, abs=1e-3)


def test_a_part_of_a_quantized_weight_is_that_part():
    torch.manual_seed(1)
    weight = torch.randn(96, 512)
    for double in (False, True):
        whole = quantize_nf4(weight, double=double)
        for place in ((slice(0, 48), slice(0, 512)), (slice(0, 96), slice(256, 512))):
            torch.testing.assert_close(
                whole.part(place).dequantize(torch.float32),
                whole.dequantize(torch.float32)[place],
                rtol=0,
                atol=0,
            )

"""Quantized layers against the weights they replace, and decoders loaded with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from workers.contracts.specs.model import ModelSource, ModelSpec
from workers.inference.model_loading import load_model
from workers.inference.quantize.linears import Int4Linear, quantize_linear, round_groups
from workers.inference.quantize.replace_linears import quantize_decoder, weight_bytes
from workers.models.decoder import Decoder
from workers.models.hf.saving import save_hugging_face
from workers.models.qat import fake_quantized
from workers.models.weights.parameter_shapes import named_weights
from workers.runtime.exit_codes import UserError

SHAPES: dict[str, dict[str, Any]] = {
    "gqa-bias": {"kv_heads": 2, "bias": "qkv"},
    "mla": {
        "kv_heads": 4,
        "attention": "mla",
        "mla": {
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
        },
    },
    "moe": {
        "moe": {"experts": 4, "top_k": 2, "expert_ffn": 32, "shared_experts": 1},
        "tie_embeddings": True,
    },
}
# of outputs over their energy: a step of 1/127 and of 1/15 of the range, e4m3's three bits
MOST = {"int8": 1e-4, "w8a8": 3e-4, "int4": 2e-2, "fp8": 2e-3}


def spec_of(**more: Any) -> ModelSpec:
    record = {
        "name": "t",
        "layers": 2,
        "hidden": 64,
        "heads": 4,
        "kv_heads": 4,
        "ffn": 96,
        "vocab": 61,
        "max_seq_len": 64,
    }
    return ModelSpec.from_dict({**record, **more})


@pytest.mark.parametrize("kind", MOST)
@pytest.mark.parametrize(
    ("inputs", "outputs", "rows"), [(64, 32, 1), (64, 32, 40), (72, 20, 3), (160, 48, 30)]
)
def test_a_layer_is_its_weight(kind, inputs, outputs, rows):
    generator = torch.Generator().manual_seed(inputs + rows)
    weight, bias = (
        torch.randn(shape, generator=generator) for shape in ((outputs, inputs), (outputs,))
    )
    x = torch.randn(2, rows, inputs, generator=generator)
    layer = quantize_linear(weight, kind, bias=bias, group=32)
    wanted = x @ weight.T + bias
    got = layer(x)
    assert got.shape == wanted.shape and got.dtype == x.dtype
    assert float((got - wanted).square().sum() / wanted.square().sum()) < MOST[kind]
    # the product is that of the weight, up to bf16 on a CPU and rounded activations
    own = x @ layer.weight.float().T + bias
    assert float((got - own).square().sum() / own.square().sum()) < (
        2e-3 if kind == "fp8" else 2e-4
    )
    assert layer.weight_bytes < weight.nbytes * (0.3 if kind == "int4" else 0.6)


@pytest.mark.parametrize("outputs", [32, 20])  # as torch's own product wants it, and not
def test_four_bits_are_read_back_exactly_and_as_training_rounds_them(outputs):
    weight = torch.randn(outputs, 64, generator=torch.Generator().manual_seed(3))
    codes, scales, zeros = round_groups(weight, 32)
    layer = Int4Linear(codes, scales, zeros, 32)
    assert torch.equal(layer.codes(), codes)
    whole = ((codes.float() - zeros.repeat_interleave(32, 0)) * scales.repeat_interleave(32, 0)).T
    torch.testing.assert_close(layer.weight, whole, atol=0, rtol=4e-3)
    torch.testing.assert_close(fake_quantized(weight, "int4", 32), whole, atol=1e-6, rtol=1e-6)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    turned = Int4Linear(codes, scales, zeros, 32, order=order)
    x = torch.randn(5, 64)
    torch.testing.assert_close(turned(x), layer(x[:, order]))
    torch.testing.assert_close(turned.weight[:, order], layer.weight)
    torch.testing.assert_close(
        fake_quantized(weight, "int8", 32), quantize_linear(weight, "int8").weight
    )


class InMemory:
    def __init__(self, decoder: Decoder) -> None:
        self.spec, self.where, self._tensors = decoder.spec, "memory", named_weights(decoder)

    def read(self, name: str) -> torch.Tensor:
        return self._tensors[name].detach()


def decoder_of(shape: str) -> Decoder:
    torch.manual_seed(2)
    decoder = Decoder(spec_of(**SHAPES[shape])).eval()
    with torch.no_grad():
        for name, each in decoder.named_parameters():
            each.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.2)
    return decoder


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_a_decoder_of_few_bits_computes_nearly_the_same_in_less_memory(shape, kind):
    decoder = decoder_of(shape)
    ids = torch.arange(40).view(1, -1)
    with torch.inference_mode():
        wanted, before = decoder(ids), weight_bytes(decoder)
        quantize_decoder(decoder, kind)
        got = decoder(ids)
    assert float((got - wanted).square().sum() / wanted.square().sum()) < (
        0.35 if kind == "int4" else 0.15 if kind == "fp8" else 0.01
    )
    assert weight_bytes(decoder) < before * (0.5 if kind == "int4" else 0.55)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_loading_in_few_bits_is_loading_and_rounding(kind, tmp_path: Path):
    decoder = decoder_of("gqa-bias")
    save_hugging_face(InMemory(decoder), tmp_path)
    device = torch.device("cpu")
    loaded = load_model(
        ModelSource(path=str(tmp_path)), precision="fp32", device=device, quantize=kind
    ).decoder
    quantize_decoder(decoder, kind)
    ids = torch.arange(30).view(1, -1)
    with torch.inference_mode():
        torch.testing.assert_close(loaded(ids), decoder(ids))
    again = load_model(spec_of(), precision="bf16", device=device, quantize=kind).decoder
    assert again(ids).isfinite().all() and not any(
        each.is_meta for each in again.state_dict().values()
    )


def test_a_weight_that_is_not_finite_is_named(tmp_path: Path):
    decoder = decoder_of("gqa-bias")
    with torch.no_grad():
        decoder.get_parameter("blocks.1.mlp.up.weight")[3, 4] = float("nan")
    save_hugging_face(InMemory(decoder), tmp_path)
    with pytest.raises(UserError, match=r"blocks\.1\.mlp\.up\.weight: .*NaN"):
        load_model(
            ModelSource(path=str(tmp_path)),
            precision="fp32",
            device=torch.device("cpu"),
            quantize="int8",
        )

"""Published quantized layouts, packed bit by bit as their authors do: read exactly or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.workers.inference.quantize.test_layers import InMemory, decoder_of
from workers.contracts.specs.model import ModelSource
from workers.inference.model_loading import load_model
from workers.inference.quantize.linears import Int4Linear
from workers.models.errors import WeightsError
from workers.models.hf.quantized_formats import pack, read_quantization, unpack
from workers.models.hf.saving import save_hugging_face
from workers.models.weights.open import open_weights
from workers.runtime.exit_codes import UserError

GROUP = 32


def awq_by_hand(codes_KN: Tensor) -> Tensor:
    """AutoAWQ, WQLinear_GEMM.from_linear: column by column, shifted by its order."""
    rows, columns = codes_KN.shape
    packed = torch.zeros(rows, columns // 8, dtype=torch.int64)
    for column in range(columns // 8):
        for place, shift in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
            packed[:, column] |= codes_KN[:, column * 8 + shift].long() << (place * 4)
    return signed(packed)


def gptq_by_hand(codes: Tensor, dim: int) -> Tensor:
    """AutoGPTQ, QuantLinear.pack: eight rows (weights) or columns (zeros) to an int32, the first
    lowest.
    """
    turned = codes if dim == 0 else codes.T
    packed = torch.zeros(turned.shape[0] // 8, turned.shape[1], dtype=torch.int64)
    for row in range(turned.shape[0]):
        packed[row // 8] |= turned[row].long() << (row % 8 * 4)
    return signed(packed if dim == 0 else packed.T.contiguous())


def signed(x: Tensor) -> Tensor:
    return torch.where(x >= 1 << 31, x - (1 << 32), x).to(torch.int32)


def numbers(inputs: int, outputs: int, *, least_zero: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    codes = torch.randint(0, 16, (inputs, outputs), generator=generator)
    zeros = torch.randint(least_zero, 16, (inputs // GROUP, outputs), generator=generator)
    return codes, zeros, (torch.rand(inputs // GROUP, outputs, generator=generator) + 0.5).half()


def folder_of(tmp_path: Path, config: dict[str, Any], form: str) -> tuple[Path, dict[str, Tensor]]:
    """A Llama-shaped folder whose linears are random numbers in that form, and the weights that
    they mean.
    """
    save_hugging_face(InMemory(decoder_of("gqa-bias")), tmp_path)
    record = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**record, "quantization_config": config}))
    tensors, meant = load_file(tmp_path / "model.safetensors"), {}
    for name in [each for each in tensors if each.endswith("_proj.weight")]:
        outputs, inputs = tensors.pop(name).shape
        prefix = name.removesuffix(".weight")
        codes, zeros, scales = numbers(inputs, outputs, least_zero=1 if form == "gptq" else 0)
        groups = torch.arange(inputs) // GROUP
        if form == "awq":
            parts = {"qweight": awq_by_hand(codes), "qzeros": awq_by_hand(zeros), "scales": scales}
        else:
            if config["desc_act"]:
                groups = groups[
                    torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
                ]
            stored = zeros - (1 if form == "gptq" else 0)
            parts = {
                "qweight": gptq_by_hand(codes, 0),
                "qzeros": gptq_by_hand(stored, 1),
                "scales": scales,
                "g_idx": groups.int(),
            }
        tensors |= {f"{prefix}.{part}": each for part, each in parts.items()}
        meant[name] = ((codes - zeros[groups]).float() * scales[groups].float()).T
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path, meant


AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}


@pytest.mark.parametrize(
    ("form", "config"),
    [
        ("awq", AWQ),
        ("gptq", GPTQ),
        ("gptq", {**GPTQ, "desc_act": True}),
        ("v2", {**GPTQ, "desc_act": True, "checkpoint_format": "gptq_v2"}),
    ],
)
def test_published_folders_are_read_exactly_and_stay_in_four_bits(form, config, tmp_path):
    folder, meant = folder_of(tmp_path, config, form)
    weights = open_weights(folder)
    names = {
        "q_proj": "attn.q",
        "o_proj": "attn.o",
        "down_proj": "mlp.down",
        "gate_proj": "mlp.gate",
    }
    decoder = load_model(
        ModelSource(path=str(folder)), precision="fp32", device=torch.device("cpu")
    ).decoder
    for theirs, ours in names.items():
        (wanted,) = [each for name, each in meant.items() if ".1." in name and theirs in name]
        assert torch.equal(weights.read(f"blocks.1.{ours}.weight").float(), wanted.half().float())
        layer = decoder.get_submodule(f"blocks.1.{ours}")
        assert isinstance(layer, Int4Linear)
        torch.testing.assert_close(layer.weight, wanted, atol=0, rtol=4e-3)  # scales in bf16
        x = torch.randn(3, wanted.shape[1])
        assert (
            float((layer.product(x) - x @ wanted.T).square().sum() / (x @ wanted.T).square().sum())
            < 1e-4
        )
    with pytest.raises(UserError, match=r"already stored as"):
        load_model(
            ModelSource(path=str(folder)),
            precision="fp32",
            device=torch.device("cpu"),
            quantize="int8",
        )


@pytest.mark.parametrize("form", ["awq", "gptq", "gptq_v2", "pack-quantized", "int-quantized"])
def test_what_is_written_is_what_is_read(form):
    config: dict[str, Any] = {
        "awq": AWQ,
        "gptq": GPTQ,
        "gptq_v2": {**GPTQ, "checkpoint_format": "gptq_v2"},
    }.get(
        form,
        {
            "quant_method": "compressed-tensors",
            "format": form,
            "config_groups": {
                "group_0": {
                    "weights": {
                        "num_bits": 8,
                        "type": "int",
                        "symmetric": True,
                        "strategy": "channel",
                    }
                }
            },
        },
    )
    how = read_quantization({"quantization_config": config}, "here")
    assert how is not None
    from workers.models.hf.quantized_formats import Packed

    if how.kind == "int4":
        codes, zeros, scales = numbers(64, 16, least_zero=1)
        order = torch.randperm(64) if form == "gptq_v2" else None
        given = Packed("int4", codes.to(torch.uint8), scales, zeros.to(torch.uint8), GROUP, order)
        by_hand = (
            awq_by_hand(codes)
            if form == "awq"
            else gptq_by_hand(codes if order is None else codes[order.argsort()], 0)
        )
        assert torch.equal(pack(how, given)[0], by_hand)
    else:
        given = Packed("int8", torch.randint(-128, 128, (6, 10), dtype=torch.int8), torch.rand(6))
    parts = dict(zip(how.parts("a"), pack(how, given), strict=True))
    assert torch.equal(unpack(how, "a", parts.__getitem__, "here").weight(), given.weight())


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda t: {**t, "a.qzeros": t["a.qzeros"][:, :1]},
            r"a has qweight .*: scales and zeros must be \[2, 16\]",
        ),
        (
            lambda t: {**t, "a.scales": t["a.scales"][:1]},
            "scales and zeros must be|g_idx must name",
        ),
        (lambda t: {**t, "a.qweight": t["a.qweight"].long()}, "packed numbers are int32"),
        (lambda t: {**t, "a.g_idx": t["a.g_idx"] + 1}, "g_idx must name one of 2 groups"),
        (lambda t: {**t, "a.g_idx": t["a.g_idx"] * 0}, "groups do not have 32 inputs each"),
        (lambda t: {**t, "a.qzeros": t["a.qzeros"] * 0 - 1}, "a zero of 16"),
        (lambda t: {**t, "a.scales": t["a.scales"] * float("nan")}, "must be finite"),
    ],
)
def test_corrupt_tensors_are_refused(spoil, message):
    codes, zeros, scales = numbers(64, 16, least_zero=1)
    good = {
        "a.qweight": gptq_by_hand(codes, 0),
        "a.qzeros": gptq_by_hand(zeros - 1, 1),
        "a.scales": scales,
        "a.g_idx": torch.arange(64, dtype=torch.int32) // GROUP,
    }
    how = read_quantization({"quantization_config": GPTQ}, "here")
    assert how is not None
    unpack(how, "a", good.__getitem__, "here")
    with pytest.raises(WeightsError, match=message):
        unpack(how, "a", spoil(good).__getitem__, "here")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**GPTQ, "bits": 3}, "have 3 bits; only 4"),
        ({**AWQ, "version": "gemv"}, "version is 'gemv'"),
        ({**GPTQ, "group_size": "x"}, "group_size is 'x'"),
        ({"quant_method": "bitsandbytes"}, "quantized by 'bitsandbytes'"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4"}, "format is 'nvfp4'"),
        ([], "is not an object"),
    ],
)
def test_unreadable_configurations_are_reported(config, message):
    with pytest.raises(WeightsError, match=message):
        read_quantization({"quantization_config": config}, "here")


def test_missing_parts_and_wrong_sizes_are_reported(tmp_path):
    folder, _ = folder_of(tmp_path, AWQ, "awq")
    tensors = load_file(folder / "model.safetensors")
    some = next(name for name in tensors if name.endswith("q_proj.scales"))
    save_file(
        {name: each for name, each in tensors.items() if name != some}, folder / "model.safetensors"
    )
    with pytest.raises(WeightsError, match="1 tensors are missing, the first is"):
        open_weights(folder)
    prefix = some.removesuffix(".scales")
    codes, zeros, scales = numbers(64, 8)
    tensors |= {
        f"{prefix}.qweight": awq_by_hand(codes),
        f"{prefix}.qzeros": awq_by_hand(zeros),
        some: scales,
    }
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"has shape \[8, 64\], the configuration wants"):
        load_model(ModelSource(path=str(folder)), precision="fp32", device=torch.device("cpu"))

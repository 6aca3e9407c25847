"""fp8 training: e4m3 tiles and their products bit for bit as the recipe says, in every stage, over
any layer.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.matrix import FULL
from tests.workers.training.conftest import TINY, make_spec
from workers.contracts.specs.model import ModelSpec
from workers.models.decoder import Decoder
from workers.models.initialize import initialize
from workers.models.moe.experts import StackedLinear
from workers.training.fp8 import apply_fp8, hopper
from workers.training.fp8.linear import Fp8Linear, Fp8StackedLinear, multiply
from workers.training.fp8.tiles import BLOCK, COLUMN, ROW, quantize

BATCH = {"global_batch_size": 4, "micro_batch_size": 2}
STEPS = 6 if FULL else 4
# M tokens, N outputs, K inputs: whole tiles; ragged in all; smaller than one
SHAPES = [(256, 128, 256), (131, 200, 300), (5, 24, 40)]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Of many magnitudes: rows and columns a thousandfold apart, zeros, and whole tiles of them."""
    generator = torch.Generator().manual_seed(seed)
    results = torch.randn(*shape, generator=generator)
    results *= 10 ** (3 * torch.rand(shape[0], 1, generator=generator) - 3)
    results[:, 0] *= 1000
    results[0] = 0
    results[torch.rand(*shape, generator=generator) < 0.05] = 0
    return results


def e4m3(value: np.ndarray) -> np.ndarray:
    """The nearest e4m3 number, ties to even, by its definition: 4 significant bits, exponents -6 to
    8, largest 448.
    """
    exponent = np.maximum(np.frexp(np.where(value == 0, 1.0, value))[1] - 1, -6)
    step = np.exp2(exponent - 3.0)
    return np.clip(np.rint(value / step) * step, -448, 448)


def reference(matrix: Tensor, tile: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """e4m3 values, and those times their scales, in fp64, tile by tile."""
    given = matrix.double().numpy()
    codes, decoded = np.zeros_like(given), np.zeros_like(given)
    for top in range(0, given.shape[0], tile[0]):
        for left in range(0, given.shape[1], tile[1]):
            place = np.s_[top : top + tile[0], left : left + tile[1]]
            scale = np.float32(max(np.abs(given[place]).max(), 448 * 2.0**-126)) / np.float32(448)
            codes[place] = e4m3((given[place].astype(np.float32) / scale).astype(np.float64))
            decoded[place] = codes[place] * np.float64(scale)
    return codes, decoded


@pytest.mark.parametrize("tile", [ROW, COLUMN, BLOCK])
@pytest.mark.parametrize("shape", [(256, 256), (131, 300), (5, 40)])
def test_tiles(shape, tile):
    matrix = numbers(*shape)
    tiles = quantize(matrix, tile)
    codes, decoded = reference(matrix, tile)
    assert tiles.codes.dtype is torch.float8_e4m3fn and tiles.codes.shape == matrix.shape
    assert np.array_equal(tiles.codes.float().numpy(), codes)
    assert np.allclose(tiles.decoded().numpy(), decoded, rtol=2**-23, atol=0)
    assert torch.equal(tiles.transposed().decoded(), tiles.decoded().t())
    assert np.abs(decoded - matrix.double().numpy()).max() <= 2**-4 * matrix.abs().max()


def test_every_code_and_what_is_not_finite():
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    every = every[every.isfinite()].unsqueeze(0)  # two tiles, each with 448 or -448 in it
    assert torch.equal(quantize(every, ROW).decoded(), every)
    for bad in (float("nan"), float("inf")):
        broken = torch.ones(3, 200)
        broken[1, 5] = bad
        decoded = quantize(broken, ROW).decoded()
        assert (
            decoded[1, :128].isnan().any()
            and decoded[[0, 2]].isfinite().all()
            and decoded[1, 128:].isfinite().all()
        )


def layer(m: int, n: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    x, weight, gradient = numbers(m, k, seed=1), numbers(n, k, seed=2), numbers(m, n, seed=3)
    return x.requires_grad_(), weight.requires_grad_(), gradient


@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_products(m, n, k):
    x, weight, gradient = layer(m, n, k)
    out = multiply(x, weight)
    out.backward(gradient)
    rows, blocks = reference(x.detach(), ROW)[1], reference(weight.detach(), BLOCK)[1]
    wanted = {
        "output": (out.detach(), rows @ blocks.T),
        "input's gradient": (x.grad, reference(gradient, ROW)[1] @ blocks),
        "weight's gradient": (
            weight.grad,
            reference(gradient, COLUMN)[1].T @ reference(x.detach(), COLUMN)[1],
        ),
    }
    for name, (results, exact) in wanted.items():
        apart = np.abs(results.double().numpy() - exact).max()
        # fp32 sums of up to 256 products, in the order of whichever library multiplies
        assert apart <= 2e-6 * np.abs(exact).max(), name
    plain = (x @ weight.t()).detach()
    assert 1e-3 < (out.detach() - plain).norm() / plain.norm() < 0.05, (
        "8 bits, and no more lost than that"
    )


def cublas(a, b, scale_a, kind_a, scale_b, kind_b, *, output_dtype, use_fast_accum):
    """What scaled_mm computes on Hopper, with its checks of sizes and scale layout."""
    kinds, (rows, k), columns = functional.ScalingType, a.shape, b.shape[1]
    assert (rows % 4, columns % 16, k % 16, use_fast_accum) == (0, 0, 0, False)
    assert a.stride() == (k, 1) and b.stride() == (1, k), "row-major times column-major"
    assert kind_a is kinds.BlockWise1x128 and scale_a.dtype is scale_b.dtype is torch.float32
    parts = -(-k // 128)
    assert (
        scale_a.shape == (rows, parts)
        and scale_a.stride(0) == 1
        and (parts == 1 or scale_a.stride(1) == rows)
    )
    if kind_b is kinds.BlockWise128x128:
        padded = -(-parts // 4) * 4
        assert scale_b.shape == (padded, -(-columns // 128)) and scale_b.stride(0) == 1
        assert scale_b.shape[1] == 1 or scale_b.stride(1) == padded
        wide_b = (
            scale_b[:parts].repeat_interleave(128, 0)[:k].repeat_interleave(128, 1)[:, :columns]
        )
    else:
        assert scale_b.shape == (columns, parts) and scale_b.stride(0) == 1
        wide_b = scale_b.t().repeat_interleave(128, 0)[:k]
    wide_a = scale_a.repeat_interleave(128, 1)[:, :k]
    return ((a.float() * wide_a) @ (b.float() * wide_b)).to(output_dtype)


@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_operands_lie_as_hopper_reads_them(m, n, k, monkeypatch):
    results = []
    for fast in (False, True):
        x, weight, gradient = layer(m, n, k)
        monkeypatch.setattr(hopper, "usable", lambda device, fast=fast: fast)
        monkeypatch.setattr(functional, "scaled_mm", cublas, raising=False)
        out = multiply(x, weight)
        out.backward(gradient)
        results.append((out.detach(), x.grad, weight.grad))
    for emulated, fast in zip(*results, strict=True):
        assert emulated.shape == fast.shape
        assert (emulated - fast).abs().max() <= 1e-6 * emulated.abs().max()


def test_hopper_is_not_chosen_here():
    assert not hopper.usable(torch.device("cpu"))
    with pytest.raises(ValueError, match="transposed"):
        hopper.operand(quantize(torch.ones(4, 4), COLUMN))


MODELS = {
    "biases": {
        **TINY,
        "bias": "all",
        "gated_mlp": False,
        "norm": "layernorm",
        "position": "learned",
    },
    "latent attention and experts": {
        **TINY,
        "attention": "mla",
        "kv_heads": 4,
        "mla": {
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
        },
        "moe": {"experts": 4, "top_k": 2, "expert_ffn": 24, "shared_experts": 1},
    },
}


@pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))
def test_every_linear_layer_of_blocks_and_no_other(model):
    decoder = Decoder(ModelSpec.from_dict({**model, "tie_embeddings": False}))
    initialize(decoder, layers=2, seed=0)
    tokens = torch.arange(40).view(2, 20)

    def gradients() -> dict[str, Tensor]:
        decoder.zero_grad()
        functional.cross_entropy(decoder(tokens).flatten(0, 1), tokens.flatten()).backward()
        return {name: each.grad.clone() for name, each in decoder.named_parameters()}

    plain = gradients()
    apply_fp8(decoder)
    names = [
        name
        for name, module in decoder.named_modules()
        if isinstance(module, nn.Linear | StackedLinear)
    ]
    replaced = {
        name
        for name in names
        if isinstance(decoder.get_submodule(name), Fp8Linear | Fp8StackedLinear)
    }
    assert replaced == set(names) - {"head"}
    narrow = gradients()
    assert narrow.keys() == plain.keys()
    for name, gradient in narrow.items():
        if name.endswith("attn.k.bias"):
            continue  # softmax takes no notice of it: its gradient is rounding alone
        apart = (gradient - plain[name]).norm() / plain[name].norm()
        # through four products and back, 8 bits each; a token's other expert changes more than that
        assert 0 < apart < (1.0 if "experts" in name or "router" in name else 0.3), (name, apart)


@pytest.fixture(scope="module")
def alone(train, tmp_path_factory):
    plans = {"fp8": {"precision": "fp8"}, "bf16": {"precision": "bf16"}, "fp32": {}}
    return {
        name: train(make_spec(None, {**BATCH, **plan}, steps=STEPS), tmp_path_factory.mktemp(name))
        for name, plan in plans.items()
    }


def test_follows_fp32_and_keeps_less(alone):
    assert alone["fp8"].values("loss") == pytest.approx(alone["fp32"].values("loss"), rel=1e-2)
    assert alone["fp8"].values("loss") != alone["bf16"].values("loss")
    stored = {name: result.values("memory/activations_bytes")[0] for name, result in alone.items()}
    assert stored["fp8"] < stored["bf16"] < stored["fp32"]


@pytest.mark.parametrize(
    "plan",
    [
        {"dp": 2, "zero": 1},
        {"dp": 2, "zero": 3, "recompute": "full"},
        {"dp": 2, "zero": 3, "reduce_dtype": "bf16"},
        {"tp": 2, "sequence_parallel": True},
        {"pp": 2, "schedule": "1f1b"},
    ],
    ids=json.dumps,
)
def test_of_one_process(plan, alone, train, tmp_path):
    result = train(make_spec(None, {**BATCH, "precision": "fp8", **plan}, steps=STEPS), tmp_path)
    assert {each["class"] for each in result.outcomes} == {"ok"}
    apart = 2e-3 if "reduce_dtype" in plan else 5e-4
    assert result.values("loss") == pytest.approx(alone["fp8"].values("loss"), rel=apart)
    # tensor parallel ranks tile their parts of a row: other scales, as if with another seed
    norms_apart = 3e-2 if "tp" in plan else 10 * apart
    assert result.values("grad_norm") == pytest.approx(
        alone["fp8"].values("grad_norm"), rel=norms_apart
    )


def test_a_backward_pass_in_two_halves(train, tmp_path):
    deep, plan = {**TINY, "layers": 4}, {**BATCH, "precision": "fp8"}
    whole = train(make_spec(deep, plan), tmp_path / "whole")
    split = train(
        make_spec(deep, {**plan, "pp": 2, "schedule": "zbv", "virtual_stages": 2}),
        tmp_path / "split",
    )
    for name in ("loss", "grad_norm"):
        assert split.values(name) == pytest.approx(whole.values(name), rel=5e-3), name


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputing_is_the_same(recompute, alone, train, tmp_path):
    again = train(
        make_spec(None, {**BATCH, "precision": "fp8", "recompute": recompute}, steps=STEPS),
        tmp_path,
    )
    assert again.values("loss") == alone["fp8"].values("loss")
    less, more = (result.values("memory/activations_bytes")[0] for result in (again, alone["fp8"]))
    assert less < more

"""Each public operation with each argument invalid in turn: the error names it before anything is
chosen or run.

Checks that are specific to an operation are in its own file.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import kernels
from kernels import dispatch
from kernels.int8 import int8_matmul, quantize_int8
from kernels.moe import grouped_matmul, moe_gate, moe_permute, moe_unpermute
from kernels.paged_kv import plan_pages

R, T = torch.randn, torch.tensor
CACHE, TABLE, LENS = R(6, 4, 2, 16), T([[0, 1], [2, 5]]), T([8, 5])
FOUR_BITS = dict(zip(("qweight", "scales", "zeros"), kernels.pack_awq(R(8, 256)), strict=True))
E4M3 = dict(
    zip(
        ("a", "sa", "b", "sb"),
        (*kernels.quantize_1x128(R(2, 130)), *kernels.quantize_128x128(R(5, 130))),
        strict=True,
    )
)
EIGHT_BITS = dict(zip(("qweight", "scales"), quantize_int8(R(9, 70)), strict=True))
_, SORTED = moe_permute(R(2, 4), T([[0], [1]]), 2)


def _adamw(**options: Any) -> None:
    kernels.FusedAdamW([torch.ones(3, requires_grad=True)], **options)


def _step(**options: Any) -> None:
    p = torch.ones(3, requires_grad=True)
    p.grad = torch.ones(3)
    kernels.FusedAdamW([p]).step(**options)


def _unscale(gradient: Any, inv_scale: Any, found_inf: Any) -> None:
    kernels.unscale_([torch.ones(2), gradient], inv_scale, found_inf)


CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {  # valid arguments
    "attention": (
        kernels.attention,
        {
            "q": R(1, 4, 4, 16),
            "k": R(1, 6, 2, 16),
            "v": R(1, 6, 2, 16),
            "causal": True,
            "window": 3,
            "scale": 0.3,
            "softcap": 2.0,
            "return_lse": False,
        },
    ),
    "attention_varlen": (
        kernels.attention_varlen,
        {
            "q": R(8, 4, 16),
            "k": R(9, 2, 16),
            "v": R(9, 2, 16),
            "cu_q": T([0, 4, 8]),
            "cu_k": T([0, 4, 9]),
            "max_q": 4,
            "max_k": 5,
            "causal": True,
            "window": 3,
            "scale": 0.3,
            "softcap": 2.0,
        },
    ),
    "paged_attention": (
        kernels.paged_attention,
        {
            "q": R(3, 4, 16),
            "k_cache": CACHE,
            "v_cache": CACHE,
            "block_table": TABLE,
            "seq_lens": LENS,
            "cu_q": T([0, 2, 3]),
            "max_q": 2,
            "scale": 0.3,
            "num_programs": 2,
            "window": 3,
            "softcap": 1.0,
        },
    ),
    "plan_pages": (
        plan_pages,
        {"block_table": TABLE, "seq_lens": LENS, "blocks": 6, "block_size": 4, "queries": 1},
    ),
    "write_kv": (
        kernels.write_kv,
        {
            "k": R(2, 2, 16),
            "v": R(2, 2, 16),
            "k_cache": CACHE.clone(),
            "v_cache": CACHE.clone(),
            "slots": T([1, 5]),
        },
    ),
    "mla_decode": (
        kernels.mla_decode,
        {
            "q_nope": R(2, 3, 32),
            "q_rope": R(2, 3, 8),
            "latent_cache": R(6, 4, 40),
            "block_table": TABLE,
            "seq_lens": LENS,
            "scale": 0.3,
            "num_splits": 2,
        },
    ),
    "rms_norm": (kernels.rms_norm, {"x": R(2, 8), "w": R(8), "residual": R(2, 8), "eps": 1e-6}),
    "layer_norm": (kernels.layer_norm, {"x": R(2, 8), "w": R(8), "b": R(8), "eps": 1e-6}),
    "apply_rope": (
        kernels.apply_rope,
        {
            "q": R(3, 2, 8),
            "k": R(3, 1, 8),
            "cos": R(4, 4),
            "sin": R(4, 4),
            "positions": T([0, 1, 3]),
        },
    ),
    "swiglu": (kernels.swiglu, {"gate_up": R(2, 8), "up": R(2, 8)}),
    "linear_cross_entropy": (
        kernels.linear_cross_entropy,
        {
            "h": R(2, 8),
            "w": R(5, 8),
            "targets": T([0, 4]),
            "ignore_index": -100,
            "softcap": 1.0,
            "chunk": 2,
        },
    ),
    "unscale_": (
        _unscale,
        {"gradient": R(3), "inv_scale": torch.ones(1), "found_inf": torch.zeros(1)},
    ),
    "FusedAdamW": (
        _adamw,
        {"lr": 0.1, "eps": 1e-8, "weight_decay": 0.1, "clip_norm": 1.0, "seed": 0},
    ),
    "FusedAdamW.step": (
        _step,
        {"inv_scale": torch.ones(1), "grad_norm": torch.ones(1), "found_inf": torch.zeros(1)},
    ),
    "quantize_1x128": (kernels.quantize_1x128, {"x": R(2, 130)}),
    "quantize_128x128": (kernels.quantize_128x128, {"w": R(2, 130)}),
    "quantize_128x1": (kernels.quantize_128x1, {"x": R(2, 130)}),
    "fp8_matmul": (kernels.fp8_matmul, {**E4M3, "num_splits": 1}),
    "pack_awq": (
        kernels.pack_awq,
        {
            "w": R(8, 256),
            "scales": torch.ones(2, 8),
            "zeros": torch.zeros(2, 8, dtype=torch.uint8),
            "group": 128,
        },
    ),
    "int4_matmul": (
        kernels.int4_matmul,
        {"x": R(2, 256), **FOUR_BITS, "group": 128, "num_splits": 1},
    ),
    "int8_matmul": (int8_matmul, {"x": R(2, 70), **EIGHT_BITS, "num_splits": 1}),
    "quantize_int8": (quantize_int8, {"w": R(9, 70)}),
    "moe_gate": (
        moe_gate,
        {"logits": R(2, 4), "bias": R(4), "top_k": 2, "groups": 2, "top_k_groups": 1, "scale": 1.0},
    ),
    "moe_permute": (moe_permute, {"x": R(2, 4), "experts": T([[0], [1]]), "num_experts": 2}),
    "moe_unpermute": (moe_unpermute, {"y": R(2, 4), "permutation": SORTED, "weights": R(2, 1)}),
    "grouped_matmul": (grouped_matmul, {"x": R(3, 4), "w": R(2, 5, 4), "counts": T([1, 2])}),
}
FLAGS = ("causal", "return_lse")
NAMES_IN_ERRORS = {"gradient": r"grads\[1\]", "inv_scale": "inv_scale", "bias": "bias"}


def _spoilt(name: str, good: Any, alone: bool) -> dict[str, Any]:
    if not isinstance(good, torch.Tensor):
        number = {"nan": float("nan"), "a word": "a", "a tensor": torch.ones(2), "a list": [1]}
        return (
            number
            if name in FLAGS or isinstance(good, float)
            else number | {"a flag": True, "a half": 1.5}
        )
    spoilt = {"a list": [1.0], "a number": 3, "flags": torch.ones(good.shape, dtype=torch.bool)}
    spoilt["complex numbers"] = torch.ones(good.shape, dtype=torch.complex64)
    spoilt["sparse"] = torch.ones(good.shape).to_sparse()
    return spoilt if alone else spoilt | {"elsewhere": good.to("meta")}


@pytest.mark.parametrize("name", CALLS)
def test_each_argument_is_checked_before_the_choice(name: str) -> None:
    call, good = CALLS[name]
    call(**good)
    dispatch.clear_records()
    alone = sum(isinstance(x, torch.Tensor) for x in good.values()) == 1
    for argument, value in good.items():
        for fault, bad in _spoilt(argument, value, alone).items():
            with pytest.raises((TypeError, ValueError)) as record:
                call(**{**good, argument: bad})
            message = str(record.value)
            named = (
                NAMES_IN_ERRORS.get(argument, argument).replace("\\", "") in message
                or "is on meta" in message
            )
            assert named and message.endswith("."), f"{argument}, {fault}: {message}"
            assert dispatch.explain() == [], (
                f"{argument}, {fault}: refused after something was chosen"
            )


WIDE = R(1, 1, 1, 16).expand(6, 4, 2, 16)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            partial(kernels.write_kv, R(2, 2, 16), R(2, 2, 16), CACHE.clone(), WIDE, T([0, 1])),
            "v_cache.*expanded",
        ),
        (
            partial(kernels.unscale_, [torch.ones(1).expand(3)], torch.ones(1), torch.zeros(1)),
            r"grads\[0\].*expanded",
        ),
        (partial(kernels.quantize_1x128, torch.ones(3, 0)), "must not be empty"),
        (partial(kernels.apply_rope, R(3, 0, 8), R(3, 1, 8), R(4, 4), R(4, 4)), "q has shape"),
        (
            partial(
                kernels.paged_attention, R(2, 4, 16), CACHE, CACHE, TABLE, LENS, num_programs=70000
            ),
            "in 1 to 65536",
        ),
        (
            partial(
                kernels.pack_awq,
                R(8, 128),
                scales=torch.zeros(1, 8),
                zeros=torch.zeros(1, 8).byte(),
            ),
            "scales contain",
        ),
        (
            partial(
                kernels.pack_awq,
                R(8, 128),
                scales=torch.ones(1, 8),
                zeros=torch.full((1, 8), 16).byte(),
            ),
            "contain 16",
        ),
        (partial(grouped_matmul, R(3, 4), R(2, 5, 4), T([1 << 62, 1 << 62])), "x has 3 rows"),
    ],
)
def test_out_of_bounds_accesses_are_rejected(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_a_plan_for_a_larger_cache_is_rejected() -> None:
    plan = plan_pages(TABLE, LENS, blocks=7, block_size=4)
    with pytest.raises(ValueError, match="a cache of 7 blocks; this one has 6"):
        kernels.paged_attention(R(2, 4, 16), CACHE, CACHE, TABLE, LENS, plan=plan)
    random_latents = R(6, 4, 40)
    with pytest.raises(ValueError, match="a cache of 7 blocks; this one has 6"):
        kernels.mla_decode(
            R(2, 3, 32), R(2, 3, 8), random_latents, TABLE, LENS, scale=0.3, plan=plan
        )
    with pytest.raises(TypeError, match="scales must be a pair"):
        kernels.paged_attention(
            R(2, 4, 16), CACHE.char(), CACHE.char(), TABLE, LENS, scales=(R(6, 4, 2),)
        )  # type: ignore[arg-type]

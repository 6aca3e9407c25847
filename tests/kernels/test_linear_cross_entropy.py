"""Linear cross-entropy on a CPU: chunks and shards against fp64 autograd over full logits, memory,
bad arguments.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from kernels import dispatch, explain, linear_cross_entropy
from kernels.gpu.linear_cross_entropy import results
from tests.kernels.compare import assert_close

NAMES = ["loss", "dh", "dw"]
TARGETS = torch.tensor([[0, 130, -100, 64], [5, 5, -100, 77]])


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(2, 4, 24).to(dtype), torch.randn(131, 24).to(dtype), TARGETS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_chunks_match_loss_and_gradients_of_full_logits(
    dtype: torch.dtype, reduction: str, softcap: float
) -> None:
    operands = inputs(dtype)
    options: dict[str, Any] = {"reduction": reduction, "softcap": softcap}
    exact, plain = (
        results("reference", operands, torch.float64, **options),
        results("reference", operands, dtype, **options),
    )
    for chunk in (None, 3):
        ours = results(None, operands, dtype, chunk=chunk, **options)
        floor = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
        assert_close(NAMES, ours, exact, plain, floor=floor)


def test_the_gradient_passes_gradcheck() -> None:
    h, w, targets = inputs(torch.float64)
    h, w = h[:, :, :5].contiguous().requires_grad_(), w[:, :5].contiguous().requires_grad_()

    def summed(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(a, b, targets, chunk=3, softcap=2.0)

    assert torch.autograd.gradcheck(summed, (h, w))


def test_fp16_keeps_gradients_that_need_the_loss_scale() -> None:
    h, w, targets = inputs(torch.float16)
    scaled = results(None, (h, w, targets), torch.float16, upstream=4096.0)
    exact = results("reference", (h, w, targets), torch.float64, upstream=4096.0)
    assert_close(NAMES[1:], scaled[1:], exact[1:], exact[1:], floor=2e-3)


def relative_error(value: torch.Tensor, exact: torch.Tensor) -> float:
    return float((value.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("factor", [1.0, 8 / (60 * 8192), 8 / (48 * 8192)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_scaled_by_the_exact_factor(factor: float, dtype: torch.dtype) -> None:
    h, w = torch.randn(256, 64).to(dtype), torch.randn(131, 64).to(dtype)
    operands = (h, w, torch.randint(0, 131, (256,)))
    once = results(None, operands, dtype, reduction="sum")[1:]
    ours = results(None, operands, dtype, reduction="sum", upstream=factor)[1:]
    for scaled, plain in zip(ours, once, strict=True):
        # a common factor: the mean ratio shows a bias that roundings of elements do not
        ratio = float((scaled.double() * plain.double()).sum() / plain.double().square().sum())
        bound = 1e-6 if dtype == torch.float32 else 2e-4
        assert ratio / factor == pytest.approx(1.0, abs=bound)


def test_many_chunks_round_the_weight_gradient_once() -> None:
    h, w = torch.randn(256, 32).bfloat16(), torch.randn(40, 32).bfloat16()
    operands = (h, w, torch.randint(0, 40, (256,)))
    exact = results("reference", operands, torch.float64, upstream=0.3)[2]
    errors = {
        chunk: relative_error(
            results(None, operands, torch.bfloat16, chunk=chunk, upstream=0.3)[2], exact
        )
        for chunk in (4, 256)
    }
    # logits in bf16 cost the same for any chunk
    assert errors[4] <= errors[256] * 1.05, errors


def test_full_logits_are_never_in_memory() -> None:
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out._base is None:
                largest = max(largest, out.untyped_storage().nbytes())
            return out

    h, w = torch.randn(512, 8, requires_grad=True), torch.randn(3000, 8, requires_grad=True)
    with Watch():
        linear_cross_entropy(h, w, torch.randint(0, 3000, (512,)), chunk=64).backward()
    assert largest <= 64 * 3000 * 4
    assert h.grad is not None and w.grad is not None


def test_without_counted_targets_it_matches_torch() -> None:
    h, w = torch.randn(3, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True)
    loss = linear_cross_entropy(h, w, torch.full((3,), -100))
    assert loss.isnan()
    loss.backward()
    assert h.grad is not None and not h.grad.any()
    assert linear_cross_entropy(h[:0], w, torch.zeros(0).long(), reduction="sum") == 0


def test_a_second_backward_gives_the_same_gradients() -> None:
    h, w, targets = inputs()
    loss = linear_cross_entropy(h.requires_grad_(), w.requires_grad_(), targets)
    first = [
        g.clone() for g in torch.autograd.grad(loss, (h, w), torch.tensor(2.0), retain_graph=True)
    ]
    torch.testing.assert_close(list(torch.autograd.grad(loss, (h, w), torch.tensor(2.0))), first)


def test_the_reason_for_torch_on_a_cpu_is_recorded() -> None:
    dispatch.clear_records()
    linear_cross_entropy(*inputs())
    (record,) = explain()
    assert record["backend"] == "torch" and "CPU" in str(record["reason"])


def _sharded(group: dist.ProcessGroup) -> None:
    split, rank = 13, group.rank()
    h = torch.linspace(-2, 2, 9 * 16).sin().view(9, 16)
    w = torch.linspace(-3, 3, 21 * 16).cos().view(21, 16)
    mine = slice(split, 21) if rank else slice(split)
    targets = torch.tensor([0, 20, 10, 11, -100, 3, 12, 19, -100])
    every: list[dict[str, Any]] = [
        {},
        {"reduction": "sum", "softcap": 1.5},
        {"reduction": "none", "start": split * rank},
    ]
    for options in every:
        plain = {k: v for k, v in options.items() if k != "start"}
        full = results("reference", (h, w, targets), torch.float32, **plain)
        ours = results(None, (h, w[mine], targets), torch.float32, group=group, chunk=4, **options)
        torch.testing.assert_close(ours, [*full[:2], full[2][mine]])
    beyond = torch.tensor([50])
    assert linear_cross_entropy(h[:1], w[:13], beyond, group=group, start=13 * rank).isnan()
    with pytest.raises(ValueError, match="0 to 25"):
        linear_cross_entropy(h[:1], w[:13], beyond, group=group)


def test_a_sharded_vocabulary_matches_the_full_one() -> None:
    store = dist.HashStore()  # both ranks are threads of one process

    def run(rank: int) -> None:
        _sharded(dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=240)))

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(run, rank) for rank in (0, 1)]:
            done.result(timeout=280)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"targets": torch.tensor([0, 5])},
            ValueError,
            "targets contain 5; they must be in 0 to 4",
        ),
        ({"targets": torch.tensor([0, -1])}, ValueError, "targets contain -1"),
        ({"targets": torch.tensor([0.0, 1.0])}, TypeError, "targets is float32"),
        ({"targets": torch.tensor([0, 1, 2])}, ValueError, "targets has shape"),
        ({"w": torch.randn(5, 7)}, ValueError, "w has shape"),
        ({"w": torch.randn(5, 8).half()}, TypeError, "must be equal"),
        ({"reduction": "max"}, ValueError, "reduction is 'max'"),
        ({"chunk": 0}, ValueError, "chunk is 0"),
        ({"softcap": -1.0}, ValueError, "softcap is -1"),
    ],
)
def test_bad_arguments_raise_errors_that_name_them(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    good: dict[str, Any] = {
        "h": torch.randn(2, 8),
        "w": torch.randn(5, 8),
        "targets": torch.tensor([0, 4]),
    }
    assert linear_cross_entropy(**good).isfinite()
    with pytest.raises(error, match=message):
        linear_cross_entropy(**{**good, **changes})

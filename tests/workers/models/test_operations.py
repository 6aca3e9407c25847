"""Kernels compute the same as plain torch operations, and choices are reported with reasons."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kernels import explain
from kernels.dispatch import clear_records
from tests.workers.models.block_shapes import SHAPES, TOKENS, built, gradients
from workers.metrics.kernel_choices import kernels_chosen
from workers.models.layers.attention_math import attend
from workers.models.layers.documents import Documents
from workers.models.layers.operations import make_plain

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _clear_choices() -> Iterator[None]:
    clear_records()
    yield
    clear_records()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_step_by_step_is_the_same_to_rounding(name: str, packed: bool) -> None:
    chosen, plain = built(name), built(name)
    make_plain(plain)
    documents = Documents([[0, 3, 20], [0]], TOKENS.shape[1], CPU) if packed else None
    ours, theirs = gradients(chosen, documents), gradients(plain, documents)
    assert ours.keys() == theirs.keys() == {"loss", *dict(chosen.named_parameters())}
    for each, result in ours.items():
        torch.testing.assert_close(
            result,
            theirs[each],
            rtol=2e-5,
            atol=2e-6,
            msg=lambda message, at=each: f"{at}: {message}",
        )


@pytest.mark.parametrize("name", ["llama", "gpt-2", "capped"])
def test_losses_without_logits_are_those_of_logits(name: str) -> None:
    """The head's own forward pass where it has a weight, the embedding's where they share one."""
    decoder = built(name)
    targets = TOKENS.roll(-1, 1).clone()
    targets[0, :5] = -100
    whole = torch.nn.functional.cross_entropy(
        decoder(TOKENS).flatten(0, 1), targets.flatten(), reduction="none"
    )
    whole.sum().backward()
    wanted = {each: parameter.grad for each, parameter in decoder.named_parameters()}
    decoder.zero_grad()
    torch.testing.assert_close(
        decoder(TOKENS, None, targets, True), whole.view_as(TOKENS), rtol=1e-5, atol=1e-6
    )
    total = decoder(TOKENS, None, targets)
    torch.testing.assert_close(total, whole.sum(), rtol=1e-5, atol=1e-5)
    total.backward()
    for each, parameter in decoder.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[each], rtol=1e-4, atol=2e-6)


def test_each_choice_is_reported_once_with_its_reason() -> None:
    decoder = built("llama")
    for _ in range(2):
        gradients(decoder, None)
    reported = {str(row["op"]): row for row in explain()}
    assert reported.keys() == {"rms_norm", "apply_rope", "attention", "swiglu"}
    assert {row["backend"] for row in reported.values()} == {"torch", "flash"}
    assert all("a CPU tensor" in str(row["reason"]) for row in reported.values())
    assert [reported[op]["calls"] for op in ("rms_norm", "apply_rope", "attention", "swiglu")] == [
        10,
        4,
        4,
        4,
    ]
    data = kernels_chosen(CPU)
    assert (data["runtime"], data["left_out"]) == ("reference", 0) and data[
        "torch"
    ] == torch.__version__
    [row] = [row for row in data["operations"] if row["op"] == "attention"]
    assert row["call"] == "cpu, float32, head_dim 8, queries 32, keys 32, causal, grad"
    assert kernels_chosen(CPU, fused=False)["operations"] == []


@pytest.mark.parametrize(
    ("how", "bound"),
    [
        ({"window": 700}, 4 * 2048 * 2 * 16),
        ({"window": None, "value_width": 8}, 4 * 2048 * 2 * 16),
        ({"window": 300, "dropout": 0.1}, 4 * 300 * 600 * 2),
    ],
    ids=["window", "narrow values", "window that drops"],
)
def test_attention_on_a_cpu_never_holds_every_score(how: dict[str, Any], bound: int) -> None:
    """A window, and values narrower than keys: what torch's own call computes in a square."""
    length, width = 2048, how.pop("value_width", 16)
    q, k = (torch.randn(1, length, 2, 16, requires_grad=True) for _ in range(2))
    v = torch.randn(1, length, 2, width, requires_grad=True)
    largest = 0

    def saved(x: torch.Tensor) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, x.untyped_storage().nbytes())
        return x

    with torch.autograd.graph.saved_tensors_hooks(saved, lambda x: x):
        attend(q, k, v, **how).sum().backward()
    assert 0 < largest <= bound and all(x.grad is not None for x in (q, k, v))


def test_pieces_of_a_window_that_drops_see_what_the_window_lets_them() -> None:
    """So little is dropped that nothing is: pieces of 256 queries and a ragged one."""
    q, k, v = torch.randn(3, 2, 600, 2, 8).unbind()
    torch.testing.assert_close(
        attend(q, k, v, window=40, dropout=1e-30), attend(q, k, v, window=40)
    )


def test_what_drops_and_what_is_compiled_runs_by_torch() -> None:
    x = torch.randn(1, 12, 2, 8)
    torch.manual_seed(1)
    attend(x, x, x, window=None, dropout=0.5)
    [reported] = explain()
    assert (reported["backend"], reported["reason"]) == ("torch", "not own: no kernel has dropout")
    clear_records()
    decoder = built("llama")
    whole = gradients(decoder, None)
    clear_records()
    decoder.forward = torch.compile(decoder.forward, backend="eager", fullgraph=True)  # type: ignore[method-assign]
    compiled = gradients(decoder, None)
    torch.testing.assert_close(compiled, whole)
    assert {row["backend"] for row in explain()} == {"torch"} and len(explain()) >= 4
    assert all("torch.compile" in str(row["reason"]) for row in explain())

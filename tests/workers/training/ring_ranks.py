"""Functions that the ranks of a pool run for the tests of ring attention and context
parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from workers.contracts.specs.model import ModelSpec
from workers.models.decoder import Decoder
from workers.models.initialize import initialize
from workers.models.layers.attention_math import attend
from workers.models.layers.documents import Documents
from workers.models.moe.load_balance import LoadBalance
from workers.training.parallel.context import ring_attention
from workers.training.parallel.context.apply import apply_context, shard_sequence
from workers.training.parallel.context.ring_attention import ring_attend
from workers.training.parallel.context.ring_chunks import rank_spans
from workers.training.parallel.mesh import Axis
from workers.training.recompute import apply_recompute


def attention_errors(dtype: str, shapes: list[dict[str, Any]]) -> list[list[float]]:
    """For each shape, errors of this rank's output and gradients of q, k and v against plain
    attention.
    """
    return [_attention_error(getattr(torch, dtype), **shape) for shape in shapes]


def _attention_error(
    dtype: torch.dtype,
    length: int,
    heads: int,
    shared: int,
    width: int,
    value_width: int,
    window: int | None,
    starts: list[list[int]] | None,
) -> list[float]:
    documents = Documents(starts, length, torch.device("cpu")) if starts else None
    torch.manual_seed(length)
    q, k = torch.randn(2, length, heads, width), torch.randn(2, length, shared, width)
    v, slope = (
        torch.randn(2, length, shared, value_width),
        torch.randn(2, length, heads * value_width),
    )
    q, k, v, slope = (x.to(dtype) for x in (q, k, v, slope))
    full = [x.double().clone().requires_grad_() for x in (q, k, v)]
    expected = attend(*full, window=window, scale=0.3, documents=documents)
    expected.backward(slope.double())
    positions = [
        position
        for span in rank_spans(length, dist.get_world_size(), dist.get_rank())
        for position in span
    ]
    local = [x[:, positions].requires_grad_() for x in (q, k, v)]
    out = ring_attend(*local, group=None, window=window, scale=0.3, documents=documents)
    out.backward(slope[:, positions])
    pairs = [(out, expected[:, positions])] + [
        (a.grad, b.grad[:, positions]) for a, b in zip(local, full, strict=True)
    ]
    return [_error(actual, needed) for actual, needed in pairs]


def _error(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest expected value if that is above 1."""
    largest = max(1.0, expected.abs().max().item())
    return (actual.double() - expected.double()).abs().max().item() / largest


def dropout_slopes(length: int, dropout: float) -> dict[str, float]:
    """The slope of a sum of outputs over all ranks in a random direction, with fixed dropout masks,
    by gradients and by finite differences; and the mean output if all values are 1.
    """
    torch.manual_seed(dist.get_rank())
    local_length = length // dist.get_world_size()
    point = [
        torch.randn(2, local_length, heads, 8, dtype=torch.float64).requires_grad_()
        for heads in (4, 2, 2)
    ]
    direction, weights = (
        [torch.randn_like(x) for x in point],
        torch.randn(2, local_length, 32, dtype=torch.float64),
    )

    def total(step: float, leaves: list[Tensor]) -> Tensor:
        torch.manual_seed(7)
        q, k, v = (x + step * along for x, along in zip(leaves, direction, strict=True))
        return (ring_attend(q, k, v, group=None, window=None, dropout=dropout) * weights).sum()

    total(0.0, point).backward()
    slope = torch.stack(
        [
            (x.grad * along).sum()
            for x, along in zip(point, direction, strict=True)
            if x.grad is not None
        ]
    )
    with torch.no_grad():
        ones = ring_attend(
            point[0], point[1], torch.ones_like(point[2]), group=None, window=None, dropout=dropout
        )
        save_sums = torch.stack(
            [slope.sum(), (total(1e-5, point) - total(-1e-5, point)) / 2e-5, ones.mean()]
        )
    dist.all_reduce(save_sums)
    by_gradients, by_differences, mean = save_sums.tolist()
    return {
        "gradients": by_gradients,
        "differences": by_differences,
        "mean": mean / dist.get_world_size(),
    }


def decoder_errors(model: dict[str, Any], length: int, recompute: bool = False) -> dict[str, float]:
    """Errors of a decoder on this rank's positions, summed over ranks, against full sequences:
    `loss` (relative), `routing` (statistics of MoE layers), and the worst of all gradients relative
    to the largest gradient.
    """
    spec = ModelSpec.model_validate(model)
    size, rank = dist.get_world_size(), dist.get_rank()
    axis = Axis("cp", size, rank)
    torch.manual_seed(0)
    inputs, targets = (
        torch.randint(0, spec.vocab, (2, length)),
        torch.randint(0, spec.vocab, (2, length)),
    )
    loss, routing, gradients = _passes(Decoder(spec), inputs, targets)
    decoder = Decoder(spec)
    apply_context(decoder, axis)
    if recompute:
        apply_recompute(decoder, "full")
    part_loss, part_routing, part_gradients = _passes(
        decoder, shard_sequence(inputs, axis), shard_sequence(targets, axis)
    )
    assert set(part_gradients) == set(gradients)
    for summed in (part_loss, part_routing, *part_gradients.values()):
        dist.all_reduce(summed)
    largest = max(gradient.abs().max().item() for gradient in gradients.values())
    worst = max(
        (part_gradients[name] - gradient).abs().max().item() for name, gradient in gradients.items()
    )
    return {
        "loss": abs(part_loss.item() / loss.item() - 1),
        "routing": (part_routing - routing).abs().max().item(),
        "gradients": worst / largest,
    }


def _passes(
    decoder: Decoder, inputs: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    initialize(decoder, layers=decoder.spec.layers, seed=1)
    layers = [module for module in decoder.modules() if isinstance(module, LoadBalance)]
    for layer in layers:
        layer.gradient_scale = 10.0
    logits = decoder(inputs)
    loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    loss.backward()
    routing = torch.stack([layer.recorded for layer in layers]) if layers else torch.zeros(1)
    return loss.detach(), routing, {name: _gradient(p) for name, p in decoder.named_parameters()}


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def sent_bytes(
    batch: int, local_length: int, heads: int, shared: int, width: int, value_width: int, dtype: str
) -> dict[str, int]:
    """Bytes that this rank sends point to point in one forward and one backward pass."""
    sizes = [(heads, width), (shared, width), (shared, value_width)]
    q, k, v = (
        torch.randn(batch, local_length, *size).to(getattr(torch, dtype)).requires_grad_()
        for size in sizes
    )
    with _count_sends() as forward:
        out = ring_attend(q, k, v, group=None, window=None)
    with _count_sends() as backward:
        out.sum().backward()
    return {"forward": sum(forward), "backward": sum(backward)}


@contextmanager
def _count_sends() -> Iterator[list[int]]:
    posted: list[int] = []
    plain = dist.batch_isend_irecv

    def counting(operations: list[dist.P2POp]) -> list[dist.Work]:
        posted.extend(op.tensor.nbytes for op in operations if op.op is dist.isend)
        return plain(operations)

    ring_attention.dist.batch_isend_irecv = counting
    try:
        yield posted
    finally:
        ring_attention.dist.batch_isend_irecv = plain

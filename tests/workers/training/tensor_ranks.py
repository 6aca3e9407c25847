"""Functions that the ranks of a pool run for the tests of tensor and sequence parallelism."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from tests.orchestrator.planner.model.communication.collective_program import counted
from workers.contracts.specs.model import ModelSpec
from workers.contracts.specs.plan import ParallelPlan
from workers.models.decoder import Decoder
from workers.models.initialize import initialize, local_part
from workers.models.layers.head import vocab_rows
from workers.models.moe.load_balance import LoadBalance
from workers.training.objectives.token_losses import token_losses
from workers.training.parallel.batch_sharding import IGNORED
from workers.training.parallel.tensor import apply_tensor, sum_partial
from workers.training.parallel.tensor.dropout_streams import rank_stream
from workers.training.parallel.tensor.region import Region
from workers.training.parallel.tensor.vocabulary import cross_entropy
from workers.training.recompute import apply_recompute


@cache
def axis() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def build_decoder(spec: ModelSpec, **plan: Any) -> Decoder:
    """A decoder initialized as in a run, with noise added so that no norm is 1 and no bias 0."""
    with torch.device("meta"):
        decoder = Decoder(spec)
    if plan:
        apply_tensor(decoder, ParallelPlan.from_dict({"tp": dist.get_world_size(), **plan}), axis())
    decoder.to_empty(device="cpu")
    initialize(decoder, layers=spec.layers, seed=3)
    for name, tensor in [*decoder.named_parameters(), *decoder.named_buffers()]:
        generator = torch.Generator().manual_seed(sum(name.encode()))
        local, position = local_part(tensor)
        with torch.no_grad():
            local.add_(torch.randn(tensor.shape, generator=generator)[position] * 0.1)
    return decoder.train()


def run_passes(decoder: Decoder, length: int, *, ranks: int = 1) -> tuple[list[Tensor], Tensor]:
    """Forward and backward of two micro-batches: the logits of each, and the loss of each row."""
    for module in decoder.modules():
        if isinstance(module, LoadBalance):
            module.gradient_scale = 0.3 / ranks
    generator = torch.Generator().manual_seed(1)
    logits, losses = [], []
    for _ in range(2):
        tokens = torch.randint(0, decoder.spec.vocab, (2, length + 1), generator=generator)
        inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
        targets[0, 3] = IGNORED
        out = decoder(inputs)
        logits.append(out.detach().clone())  # the loss overwrites the logits
        losses.append(token_losses(out, targets).sum(1))
        losses[-1].sum().backward()
    sum_partial(decoder.parameters())
    return logits, torch.stack(losses).detach()


def decoder_errors(model: dict[str, Any], sequence_parallel: bool) -> dict[str, float]:
    """Largest differences from the unsharded decoder over two micro-batches: logits, row losses
    (relative) and gradients (relative to the parameter's largest gradient).

    Blocks recompute under sequence parallelism.
    """
    spec, length = ModelSpec.model_validate(model), 12 if sequence_parallel else 13
    plain, sharded = build_decoder(spec), build_decoder(spec, sequence_parallel=sequence_parallel)
    if sequence_parallel:
        apply_recompute(sharded, "full")
    expected, expected_losses = run_passes(plain, length)
    actual, actual_losses = run_passes(sharded, length, ranks=dist.get_world_size())
    sharded_parameters, errors = dict(sharded.named_parameters()), {}
    gradients = [p.grad for p in plain.parameters() if p.grad is not None]
    most = max(gradient.abs().max().item() for gradient in gradients)
    assert list(sharded_parameters) == [name for name, _ in plain.named_parameters()], (
        "names do not change"
    )
    for name, parameter in plain.named_parameters():
        parameter_shard: Any = sharded_parameters[name]
        assert torch.equal(parameter_shard.full_tensor(), parameter), (
            f"{name} is initialized as in a single process"
        )
        assert parameter_shard.grad is not None and parameter.grad is not None, (
            f"{name} has no gradient"
        )
        assert parameter_shard.grad.placements == parameter_shard.placements, (
            f"{name}: {parameter_shard.grad.placements}"
        )
        difference = (parameter_shard.grad.full_tensor() - parameter.grad).abs().max().item()
        largest = parameter.grad.abs().max().item()
        # without rotation, a bias of keys shifts all scores equally: its gradient is rounding error
        errors[name] = difference / (largest if largest > most * 1e-5 else most)
    logits = [
        (ours.full_tensor() - plain_logits).abs().max().item()
        for ours, plain_logits in zip(actual, expected, strict=True)
    ]
    worst = max(errors, key=errors.__getitem__)
    return {
        "logits": max(logits),
        "losses": (actual_losses / expected_losses - 1).abs().max().item(),
        worst: errors[worst],
    }


def shard_shapes(model: dict[str, Any]) -> dict[str, list[int]]:
    """The local shape of each parameter of a tensor-parallel decoder."""
    decoder = build_decoder(ModelSpec.model_validate(model), sequence_parallel=False)
    return {
        name: list(local_part(parameter)[0].shape) for name, parameter in decoder.named_parameters()
    }


def part_shapes(model: dict[str, Any]) -> list[list[int]]:
    """Shapes of the outputs of three pipeline parts under sequence parallelism.

    Checks that the parts in sequence compute the logits of the full decoder.
    """
    from workers.models.decoder import ModelPart

    spec = ModelSpec.model_validate(model)
    tokens = torch.randint(0, spec.vocab, (2, 12), generator=torch.Generator().manual_seed(2))
    shapes, x = [], tokens
    for part in (
        ModelPart(range(1), last=False),
        ModelPart(range(1, 2), first=False, last=False),
        ModelPart(range(2, 2), first=False),
    ):
        decoder = Decoder(spec, part)
        initialize(decoder, layers=spec.layers, seed=3)
        apply_tensor(
            decoder,
            ParallelPlan.from_dict({"tp": axis().size(), "sequence_parallel": True}),
            axis(),
        )
        x = decoder(x)
        shapes.append(list(x.shape))
    full = Decoder(spec)
    initialize(full, layers=spec.layers, seed=3)
    logits: Any = x
    torch.testing.assert_close(logits.full_tensor(), full(tokens), rtol=1e-5, atol=1e-5)
    return shapes


def collective_traffic(model: dict[str, Any], sequence_parallel: bool) -> dict[str, Any]:
    """Number and bytes of collectives by kind, in forward and backward of 2 x 12 tokens."""
    decoder = build_decoder(ModelSpec.model_validate(model), sequence_parallel=sequence_parallel)
    tokens = torch.zeros(2, 12, dtype=torch.int64)

    def run() -> None:
        token_losses(decoder(tokens), tokens).sum().backward()

    with CommDebugMode() as mode:
        run()
    calls: dict[str, int] = {}
    for kind, count in mode.get_comm_counts().items():
        name = str(kind).rsplit(".", 1)[-1]
        calls[name] = calls.get(name, 0) + count
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        run()
    return {"calls": calls, "bytes": counted(profiled, group=dist.get_world_size())}


def cross_entropy_errors(vocab: int, dtype: str) -> list[float]:
    """Largest errors of loss and gradient of sharded logits against torch's cross-entropy of full
    logits. Each row has its own weight.
    """
    generator = torch.Generator().manual_seed(vocab)
    full = (
        (torch.randn(3, 5, vocab, generator=generator) * 20)
        .to(getattr(torch, dtype))
        .requires_grad_()
    )
    targets = torch.randint(0, vocab, (15,), generator=generator)
    targets[4], weights = IGNORED, torch.rand(15, generator=generator)
    expected = functional.cross_entropy(
        full.float().flatten(0, 1), targets, ignore_index=IGNORED, reduction="none"
    )
    (expected * weights).sum().backward()
    start, stop = vocab_rows(vocab, axis())
    local = full.detach()[..., start:stop].clone().requires_grad_()
    logits = DTensor.from_local(
        local, axis(), [Shard(2)], run_check=False, shape=full.shape, stride=full.stride()
    )
    actual = cross_entropy(logits, targets, ignored=IGNORED)
    (actual * weights).sum().backward()
    assert local.grad is not None and full.grad is not None and local.grad.dtype == local.dtype
    difference = (local.grad - full.grad[..., start:stop]).float().abs()
    return [
        (actual - expected).abs().max().item(),
        difference.max().item() if difference.numel() else 0.0,
    ]


def random_draws() -> list[list[float]]:
    """Random numbers drawn in a module with its own random stream, after it and recomputed."""

    class Drawing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            draws.append(torch.rand(4))
            return x * x

    draws: list[Tensor] = []
    module: nn.Module = Drawing()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    style = Region({}, around=rank_stream(dist.get_rank()))
    module = parallelize_module(module, mesh, style, src_data_rank=None)
    torch.manual_seed(5)
    out = checkpoint(module, torch.ones(1, requires_grad=True), use_reentrant=False)
    after = torch.rand(4)
    out.sum().backward()
    original, recomputed = draws
    return [original.tolist(), after.tolist(), recomputed.tolist()]


def errors_without_logits(model: dict[str, Any], sequence_parallel: bool) -> dict[str, float]:
    """Errors of the loss that is computed by chunks of tokens without full logits, against the loss
    of sharded logits: summed loss, loss of each token, and the worst gradient of two micro-batches.
    """
    spec = ModelSpec.model_validate(model)
    with_logits, without = (
        build_decoder(spec, sequence_parallel=sequence_parallel) for _ in range(2)
    )
    generator, errors = torch.Generator().manual_seed(1), {"per token": 0.0, "sum": 0.0}
    for per_token in (True, False):
        tokens = torch.randint(0, spec.vocab, (2, 13), generator=generator)
        inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
        targets[0, 3] = IGNORED
        expected = token_losses(with_logits(inputs), targets).sum(1)
        actual = without(inputs, None, targets, per_token)
        actual = actual.sum(1) if per_token else actual
        (expected.sum() * 0.7).backward()
        (actual.sum() * 0.7).backward()
        expected = expected if per_token else expected.sum()
        errors["per token" if per_token else "sum"] = (actual / expected - 1).abs().max().item()
    for decoder in (with_logits, without):
        sum_partial(decoder.parameters())
    for (name, one), other in zip(
        with_logits.named_parameters(), without.parameters(), strict=True
    ):
        assert one.grad is not None and other.grad is not None, f"{name} has no gradient"
        expected, actual = (local_part(grad)[0] for grad in (one.grad, other.grad))
        if expected.numel():
            worst = ((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-6)).item()
            errors["gradient"] = max(errors.get("gradient", 0.0), worst)
    return errors

"""What each rank of a pool does for the tests of tensor and sequence parallelism; asked for by
name.
"""

from __future__ import annotations

from functools import cache, partial
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
from workers.models.initialise import initialise, local_part
from workers.models.layers.head import vocab_rows
from workers.models.moe.load_balance import LoadBalance
from workers.training.loop.objective import token_losses
from workers.training.parallel.batch_sharding import IGNORED
from workers.training.parallel.tensor import apply_tensor, sum_partial
from workers.training.parallel.tensor.dropout_streams import rank_stream
from workers.training.parallel.tensor.region import Region
from workers.training.parallel.tensor.vocabulary import cross_entropy


@cache
def axis() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def built(spec: ModelSpec, **plan: Any) -> Decoder:
    """Materialised and filled as a run does it; norms, biases and balancing biases moved off one
    and zero.
    """
    with torch.device("meta"):
        decoder = Decoder(spec)
    if plan:
        apply_tensor(decoder, ParallelPlan.from_dict({"tp": dist.get_world_size(), **plan}), axis())
    decoder.to_empty(device="cpu")
    initialise(decoder, layers=spec.layers, seed=3)
    for name, tensor in [*decoder.named_parameters(), *decoder.named_buffers()]:
        generator = torch.Generator().manual_seed(sum(name.encode()))
        local, place = local_part(tensor)
        with torch.no_grad():
            local.add_(torch.randn(tensor.shape, generator=generator)[place] * 0.1)
    return decoder.train()


def passes(decoder: Decoder, length: int, *, ranks: int = 1) -> tuple[list[Tensor], Tensor]:
    """Two micro-batches forward and backward: their logits, and the summed loss of each row."""
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
        logits.append(out.detach().clone())  # the loss uses them up
        losses.append(token_losses(out, targets))
        losses[-1].sum().backward()
    sum_partial(decoder.parameters())
    return logits, torch.stack(losses).detach()


def decoder_errors(model: dict[str, Any], sequence_parallel: bool) -> dict[str, float]:
    """Against the plain decoder, largest over two micro-batches: logits, rows' losses (relative),
    and gradients, each
    against its parameter's largest one. Sequence parallel ones recompute."""
    spec, length = ModelSpec.model_validate(model), 12 if sequence_parallel else 13
    plain, laid = built(spec), built(spec, sequence_parallel=sequence_parallel)
    if sequence_parallel:
        for block in laid.blocks.values():
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    want, want_losses = passes(plain, length)
    found, found_losses = passes(laid, length, ranks=dist.get_world_size())
    own, errors = dict(laid.named_parameters()), {}
    most = max(each.grad.abs().max().item() for each in plain.parameters() if each.grad is not None)
    assert list(own) == [name for name, _ in plain.named_parameters()], "names stay"
    for name, parameter in plain.named_parameters():
        lying: Any = own[name]
        assert torch.equal(lying.full_tensor(), parameter), (
            f"{name} is drawn as one process draws it"
        )
        assert lying.grad is not None and parameter.grad is not None, f"{name} has no gradient"
        assert lying.grad.placements == lying.placements, f"{name}: {lying.grad.placements}"
        apart = (lying.grad.full_tensor() - parameter.grad).abs().max().item()
        largest = parameter.grad.abs().max().item()
        # a key's bias without rotation moves all scores alike: its gradient is rounding
        errors[name] = apart / (largest if largest > most * 1e-5 else most)
    whole = [
        (each.full_tensor() - other).abs().max().item()
        for each, other in zip(found, want, strict=True)
    ]
    worst = max(errors, key=errors.__getitem__)
    return {
        "logits": max(whole),
        "losses": (found_losses / want_losses - 1).abs().max().item(),
        worst: errors[worst],
    }


def held_shapes(model: dict[str, Any]) -> dict[str, list[int]]:
    decoder = built(ModelSpec.model_validate(model), sequence_parallel=False)
    return {
        name: list(local_part(parameter)[0].shape) for name, parameter in decoder.named_parameters()
    }


def part_shapes(model: dict[str, Any]) -> list[list[int]]:
    """What the parts of a pipeline hand on under sequence parallelism, and whether a chain of them
    is the whole.
    """
    from workers.models.decoder import Part

    spec = ModelSpec.model_validate(model)
    tokens = torch.randint(0, spec.vocab, (2, 12), generator=torch.Generator().manual_seed(2))
    shapes, x = [], tokens
    for part in (
        Part(range(1), last=False),
        Part(range(1, 2), first=False, last=False),
        Part(range(2, 2), first=False),
    ):
        decoder = Decoder(spec, part)
        initialise(decoder, layers=spec.layers, seed=3)
        apply_tensor(
            decoder,
            ParallelPlan.from_dict({"tp": axis().size(), "sequence_parallel": True}),
            axis(),
        )
        x = decoder(x)
        shapes.append(list(x.shape))
    whole = Decoder(spec)
    initialise(whole, layers=spec.layers, seed=3)
    logits: Any = x
    torch.testing.assert_close(logits.full_tensor(), whole(tokens), rtol=1e-5, atol=1e-5)
    return shapes


def messages(model: dict[str, Any], sequence_parallel: bool) -> dict[str, Any]:
    """Collectives of a micro-batch of 2 x 12 tokens, forward and backward, and their bytes, by
    kind.
    """
    decoder = built(ModelSpec.model_validate(model), sequence_parallel=sequence_parallel)
    tokens = torch.zeros(2, 12, dtype=torch.int64)

    def once() -> None:
        token_losses(decoder(tokens), tokens).sum().backward()

    with CommDebugMode() as mode:
        once()
    calls: dict[str, int] = {}
    for kind, count in mode.get_comm_counts().items():
        name = str(kind).rsplit(".", 1)[-1]
        calls[name] = calls.get(name, 0) + count
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        once()
    return {"calls": calls, "bytes": counted(profiled.events(), group=dist.get_world_size())}


def cross_entropy_errors(vocab: int, dtype: str) -> list[float]:
    """Losses and gradients of sharded logits against torch's own of whole ones, each row weighted
    otherwise.
    """
    generator = torch.Generator().manual_seed(vocab)
    whole = (
        (torch.randn(3, 5, vocab, generator=generator) * 20)
        .to(getattr(torch, dtype))
        .requires_grad_()
    )
    targets = torch.randint(0, vocab, (15,), generator=generator)
    targets[4], weights = IGNORED, torch.rand(15, generator=generator)
    want = functional.cross_entropy(
        whole.float().flatten(0, 1), targets, ignore_index=IGNORED, reduction="none"
    )
    (want * weights).sum().backward()
    start, stop = vocab_rows(vocab, axis())
    local = whole.detach()[..., start:stop].clone().requires_grad_()
    logits = DTensor.from_local(
        local, axis(), [Shard(2)], run_check=False, shape=whole.shape, stride=whole.stride()
    )
    found = cross_entropy(logits, targets, ignored=IGNORED)
    (found * weights).sum().backward()
    assert local.grad is not None and whole.grad is not None and local.grad.dtype == local.dtype
    apart = (local.grad - whole.grad[..., start:stop]).float().abs()
    return [(found - want).abs().max().item(), apart.max().item() if apart.numel() else 0.0]


def drawn() -> list[list[float]]:
    """Within a module that draws apart, after it, and within it again when it is recomputed."""

    class Drawing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(torch.rand(4))
            return x * x

    seen: list[Tensor] = []
    module = Drawing()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    style = Region({}, around=rank_stream(dist.get_rank()))
    parallelize_module(module, mesh, style, src_data_rank=None)
    torch.manual_seed(5)
    out = checkpoint(module, torch.ones(1, requires_grad=True), use_reentrant=False)
    after = torch.rand(4)
    out.sum().backward()
    first, again = seen
    return [first.tolist(), after.tolist(), again.tolist()]


def errors_without_logits(model: dict[str, Any], sequence_parallel: bool) -> dict[str, float]:
    """Losses and gradients made a chunk of tokens at a time, of the vocabulary's part that a rank
    holds, against those
    of the same ranks' sharded logits: the sum, each token's, and the worst gradient of two
    micro-batches.
    """
    spec = ModelSpec.model_validate(model)
    with_logits, without = (built(spec, sequence_parallel=sequence_parallel) for _ in range(2))
    generator, apart = torch.Generator().manual_seed(1), {"each": 0.0, "sum": 0.0}
    for each in (True, False):
        tokens = torch.randint(0, spec.vocab, (2, 13), generator=generator)
        inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
        targets[0, 3] = IGNORED
        want = token_losses(with_logits(inputs), targets)
        found = without(inputs, None, targets, each)
        found = found.sum(1) if each else found
        (want.sum() * 0.7).backward()
        (found.sum() * 0.7).backward()
        want = want if each else want.sum()
        apart["each" if each else "sum"] = (found / want - 1).abs().max().item()
    for decoder in (with_logits, without):
        sum_partial(decoder.parameters())
    for (name, one), other in zip(
        with_logits.named_parameters(), without.parameters(), strict=True
    ):
        assert one.grad is not None and other.grad is not None, f"{name} has no gradient"
        wanted, got = (local_part(grad)[0] for grad in (one.grad, other.grad))
        if wanted.numel():
            worst = ((got - wanted).abs().max() / wanted.abs().max().clamp_min(1e-6)).item()
            apart["gradient"] = max(apart.get("gradient", 0.0), worst)
    return apart

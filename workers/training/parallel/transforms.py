"""The ordered list of transforms that turn a model part into this rank's share of it.

Names, order and exclusions are declared in `workers.contracts.specs.engine_transforms`; this module
implements them. Does not depend on optimizers, data or steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from workers.contracts.specs.engine_transforms import TRANSFORMS as RULES
from workers.contracts.specs.model import ModelSpec
from workers.contracts.specs.plan import ParallelPlan
from workers.contracts.specs.weight_rounding import group_for, linear_widths
from workers.models.decoder import Decoder
from workers.models.initialise import initialise
from workers.models.layers.operations import make_plain
from workers.models.qat import fake_quantise
from workers.training.fp8 import apply_fp8
from workers.training.numerics.precision import DTYPES, CastCopies
from workers.training.parallel.context.apply import apply_context
from workers.training.parallel.mesh import World
from workers.training.recompute import apply_recompute


@dataclass(frozen=True, slots=True)
class BuildContext:
    """What transforms depend on.

    `compile`: blocks go through torch.compile. Without `fused`, blocks compute step by step, as
    formulas are written. `quantize_aware`: linears round weights to that kind, in the groups of the
    full model.
    """

    model: ModelSpec
    plan: ParallelPlan
    world: World
    seed: int = 0
    compile: bool = False
    fused: bool = True
    quantize_aware: str | None = None


@dataclass(frozen=True, slots=True)
class Transform:
    """`apply` changes a part in place if `enabled`; what it returns is stored by its name."""

    enabled: Callable[[BuildContext], bool]
    apply: Callable[[Decoder, BuildContext], Any]


def apply_transforms(
    parts: list[Decoder], context: BuildContext, *, names: tuple[str, ...] | None = None
) -> dict[str, list[Any]]:
    """Apply the enabled transforms in order (`names`: only these) to meta-built parts, in place.

    Returns what each applied transform returned, per part.
    """
    results = {}
    for rule in RULES:
        transform = TRANSFORMS[rule.name]
        if (names is None or rule.name in names) and transform.enabled(context):
            results[rule.name] = [transform.apply(part, context) for part in parts]
    return results


# transforms that decide which rank holds which parameter elements
SHARDING = ("tensor_parallel", "expert_parallel", "fully_shard")


def _compile(part: Decoder, context: BuildContext) -> None:
    # torch's compiler takes seconds to load
    from workers.training.parallel.compile import apply_compile

    apply_compile(part, context.plan)


def _uncompiled_attention(part: Decoder, context: BuildContext) -> None:
    from workers.training.parallel.compile import exclude_attention

    exclude_attention(part, always=context.plan.cp > 1)


def _tensor_parallel(part: Decoder, context: BuildContext) -> None:
    # DTensor takes a second to load
    from workers.training.parallel.tensor import apply_tensor

    mesh = context.world.axis("tp").mesh
    assert mesh is not None
    apply_tensor(part, context.plan, mesh)


def _expert_parallel(part: Decoder, context: BuildContext) -> None:
    from workers.training.parallel.expert import apply_expert

    assert context.world.experts is not None
    apply_expert(part, context.world.axis("ep"), context.world.experts)


def _fully_shard(part: Decoder, context: BuildContext) -> None:
    from workers.training.parallel.zero import shard_decoder

    assert context.world.fsdp is not None
    shard_decoder(part, context.plan, context.world.fsdp, experts=context.world.expert_fsdp)


def _initialise(part: Decoder, context: BuildContext) -> None:
    """Allocate what a meta-built part holds, on the device or offloaded, and draw its weights."""
    device = context.world.device
    if not context.plan.offloads_weights:
        part.to_empty(device=device)
    else:
        part.to_empty(device="cpu")
        for module in part.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device)
    initialise(part, layers=context.model.layers, seed=context.seed)


def _fake_quantise(part: Decoder, context: BuildContext) -> None:
    assert context.quantize_aware is not None
    fake_quantise(part, context.quantize_aware, group=group_for(linear_widths(context.model)))


def _cast(part: Decoder, context: BuildContext) -> CastCopies:
    return CastCopies(part, part.blocks, DTYPES[context.plan.precision])


TRANSFORMS: dict[str, Transform] = {
    "plain_operations": Transform(lambda c: not c.fused, lambda part, _: make_plain(part)),
    "fp8": Transform(
        lambda c: c.plan.precision == "fp8",
        lambda part, c: apply_fp8(part, fuse_quantization=c.plan.tp == 1),
    ),
    "quantize_aware": Transform(lambda c: c.quantize_aware is not None, _fake_quantise),
    "compile": Transform(lambda c: c.compile, _compile),
    "tensor_parallel": Transform(lambda c: c.world.axis("tp").mesh is not None, _tensor_parallel),
    "expert_parallel": Transform(lambda c: c.world.experts is not None, _expert_parallel),
    "fully_shard": Transform(lambda c: c.world.fsdp is not None, _fully_shard),
    "initialise": Transform(lambda c: True, _initialise),
    # `fully_shard` casts by itself
    "cast": Transform(lambda c: c.plan.precision != "fp32" and c.world.fsdp is None, _cast),
    "context_parallel": Transform(
        lambda c: c.plan.cp > 1, lambda part, c: apply_context(part, c.world.axis("cp"))
    ),
    "uncompiled_attention": Transform(lambda c: c.compile, _uncompiled_attention),
    # compiled blocks contain selective recomputation
    "recompute": Transform(
        lambda c: not (c.compile and c.plan.recompute == "selective"),
        lambda part, c: apply_recompute(part, c.plan.recompute),
    ),
}

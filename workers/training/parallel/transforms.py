"""The ordered list of transforms that turn a model part into this rank's share of it.

Names, order and exclusions are declared in `workers.contracts.specs.training_rules`; this
module implements them. Does not depend on optimizers, data or steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from workers.contracts.catalog.parameter_shapes import frozen_names
from workers.contracts.specs.finetuning.adapters import AdapterSpec
from workers.contracts.specs.model import ModelSpec
from workers.contracts.specs.plan import ParallelPlan
from workers.contracts.specs.training_rules.transforms import TRANSFORMS as RULES
from workers.contracts.specs.weight_rounding import group_for, linear_widths
from workers.models.adapters.apply import apply_adapter, freeze, quantize_frozen, trained_names
from workers.models.decoder import Decoder
from workers.models.initialize import initialize
from workers.models.layers.operations import make_plain
from workers.models.qat import fake_quantize
from workers.training.fp8 import apply_fp8, apply_torchao
from workers.training.numerics.precision import DTYPES, cast_copies, store_weights
from workers.training.parallel.context.apply import apply_context
from workers.training.parallel.mesh import World
from workers.training.recompute import apply_recompute


@dataclass(frozen=True, slots=True)
class BuildContext:
    """What transforms depend on.

    `compile`: blocks go through torch.compile. Without `fused`, blocks compute step by step, as
    formulas are written. `quantize_aware`: linears round weights to that kind, in the groups of the
    full model. `adapter` and `frozen` (name patterns) decide what is trained.
    """

    model: ModelSpec
    plan: ParallelPlan
    world: World
    seed: int = 0
    compile: bool = False
    fused: bool = True
    quantize_aware: str | None = None
    adapter: AdapterSpec | None = None
    frozen: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Transform:
    """`apply` returns the part, changed in place or replaced; it is called if `enabled`."""

    enabled: Callable[[BuildContext], bool]
    apply: Callable[[Decoder, BuildContext], Decoder]


def apply_transforms(
    parts: list[Decoder], context: BuildContext, *, names: tuple[str, ...] | None = None
) -> list[Decoder]:
    """The meta-built parts after the enabled transforms in order (`names`: only these)."""
    for rule in RULES:
        transform = TRANSFORMS[rule.name]
        if (names is None or rule.name in names) and transform.enabled(context):
            parts = [transform.apply(part, context) for part in parts]
    return parts


# transforms that decide which rank holds which parameter elements
SHARDING = ("tensor_parallel", "expert_parallel", "fully_shard")


def _compile(part: Decoder, context: BuildContext) -> Decoder:
    # torch's compiler takes seconds to load
    from workers.training.parallel.compile import apply_compile

    apply_compile(part, context.plan)
    return part


def _uncompiled_attention(part: Decoder, context: BuildContext) -> Decoder:
    from workers.training.parallel.compile import exclude_attention

    exclude_attention(part, always=context.plan.cp > 1)
    return part


def _tensor_parallel(part: Decoder, context: BuildContext) -> Decoder:
    # DTensor takes a second to load
    from workers.training.parallel.tensor import apply_tensor

    mesh = context.world.axis("tp").mesh
    assert mesh is not None
    apply_tensor(part, context.plan, mesh)
    return part


def _expert_parallel(part: Decoder, context: BuildContext) -> Decoder:
    from workers.training.parallel.expert import apply_expert

    assert context.world.experts is not None
    apply_expert(part, context.world.axis("ep"), context.world.experts)
    return part


def _fully_shard(part: Decoder, context: BuildContext) -> Decoder:
    from workers.training.parallel.zero import shard_decoder

    assert context.world.fsdp is not None
    shard_decoder(part, context.plan, context.world.fsdp, experts=context.world.expert_fsdp)
    return part


def _initialize(part: Decoder, context: BuildContext) -> Decoder:
    """Allocate what a meta-built part holds, on the device or offloaded, and draw its weights."""
    device = context.world.device
    if not context.plan.offloads_weights:
        part.to_empty(device=device)
    else:
        part.to_empty(device="cpu")
        for module in part.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device)
    initialize(part, layers=context.model.layers, seed=context.seed)
    return part


def _fake_quantize(part: Decoder, context: BuildContext) -> Decoder:
    assert context.quantize_aware is not None
    fake_quantize(part, context.quantize_aware, group=group_for(linear_widths(context.model)))
    return part


def _freeze(part: Decoder, context: BuildContext) -> Decoder:
    plan = context.plan
    if context.adapter is not None:
        apply_adapter(part, context.adapter)
        names = trained_names(part, context.adapter)
    else:
        names = {name for name, _ in part.named_parameters()}
    trained = names - frozen_names(sorted(names), context.frozen)
    freeze(part, trained, DTYPES[plan.precision])
    # what runs a block again, or waits for its gradient, needs one for the block's input
    part.input_gradients = plan.recompute != "none" or plan.pp > 1 or plan.zero >= 2
    return part


def _narrow_weights(part: Decoder, context: BuildContext) -> Decoder:
    store_weights(part, DTYPES[context.plan.weights_dtype])
    return part


def _quantize_frozen(part: Decoder, context: BuildContext) -> Decoder:
    quantize_frozen(part)
    return part


def _cast(part: Decoder, context: BuildContext) -> Decoder:
    return cast_copies(part, DTYPES[context.plan.precision])


def _plain_operations(part: Decoder, context: BuildContext) -> Decoder:
    make_plain(part)
    return part


def _fp8(part: Decoder, context: BuildContext) -> Decoder:
    recipe = context.plan.chosen_fp8_recipe(compiled=context.compile)
    if recipe != "block":
        apply_torchao(part, recipe)
    else:
        apply_fp8(part, fuse_quantization=context.plan.tp == 1)
    return part


def _context_parallel(part: Decoder, context: BuildContext) -> Decoder:
    apply_context(part, context.world.axis("cp"))
    return part


def _recompute(part: Decoder, context: BuildContext) -> Decoder:
    apply_recompute(part, context.plan.recompute)
    return part


TRANSFORMS: dict[str, Transform] = {
    "plain_operations": Transform(lambda c: not c.fused, _plain_operations),
    "freeze": Transform(lambda c: c.adapter is not None or bool(c.frozen), _freeze),
    "narrow_weights": Transform(lambda c: c.plan.narrow_weights, _narrow_weights),
    "fp8": Transform(lambda c: c.plan.precision == "fp8", _fp8),
    "quantize_aware": Transform(lambda c: c.quantize_aware is not None, _fake_quantize),
    "compile": Transform(lambda c: c.compile, _compile),
    "tensor_parallel": Transform(lambda c: c.world.axis("tp").mesh is not None, _tensor_parallel),
    "expert_parallel": Transform(lambda c: c.world.experts is not None, _expert_parallel),
    "quantize_frozen": Transform(
        lambda c: c.adapter is not None and c.adapter.storage == "nf4", _quantize_frozen
    ),
    # `fully_shard` casts by itself
    "cast": Transform(
        lambda c: c.plan.precision != c.plan.weights_dtype and c.world.fsdp is None, _cast
    ),
    # compiled blocks contain selective recomputation
    "recompute": Transform(
        lambda c: not (c.compile and c.plan.recompute == "selective"), _recompute
    ),
    "fully_shard": Transform(lambda c: c.world.fsdp is not None, _fully_shard),
    "initialize": Transform(lambda c: True, _initialize),
    "context_parallel": Transform(lambda c: c.plan.cp > 1, _context_parallel),
    "uncompiled_attention": Transform(lambda c: c.compile, _uncompiled_attention),
}

"""The transforms that turn a model into one rank's share of it, in the order the engine applies
them.

`workers.training.parallel.transforms` implements each by its name; `training_support` refuses the
combinations that `excludes` lists. Does not depend on torch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TransformRule:
    """One transform: `after` names those that must come before it if they apply.

    `excludes`: techniques that cannot be combined with it; see `training_support.EXCLUSIONS`.
    """

    name: str
    after: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()


TRANSFORMS = (
    TransformRule("plain_operations"),
    TransformRule("fp8", after=("plain_operations",), excludes=("compile", "pipedream")),
    TransformRule("quantize_aware", excludes=("fp8", "compile", "pipedream")),
    TransformRule(
        "compile",
        excludes=("split_backward", "pipedream", "fp8", "recompute_auto", "quantize_aware"),
    ),
    # linears are replaced before parameters are sharded: sharding holds on to the modules
    TransformRule("tensor_parallel", after=("fp8", "quantize_aware", "compile")),
    TransformRule("expert_parallel", after=("tensor_parallel",)),
    TransformRule("fully_shard", after=("tensor_parallel", "expert_parallel")),
    TransformRule("initialise", after=("tensor_parallel", "expert_parallel", "fully_shard")),
    TransformRule("cast", after=("tensor_parallel", "initialise")),
    TransformRule("context_parallel"),
    TransformRule("uncompiled_attention", after=("context_parallel",)),
    TransformRule("recompute", after=("cast", "compile", "fully_shard")),
)

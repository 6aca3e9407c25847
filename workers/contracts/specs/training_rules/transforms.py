"""The transforms of a model before training: their names, order and exclusions of each other."""

from __future__ import annotations

from dataclasses import dataclass

from workers.contracts.specs.training_rules.exclusions import EXCLUSIONS


@dataclass(frozen=True, slots=True)
class TransformRule:
    """One transform; those named in `after` come before it if they apply."""

    name: str
    after: tuple[str, ...] = ()

    @property
    def excludes(self) -> frozenset[str]:
        """Techniques that cannot be combined with it, from `EXCLUSIONS`."""
        return frozenset(
            other
            for row in EXCLUSIONS
            if self.name in row.techniques
            for other in row.techniques
            if other != self.name
        )


TRANSFORMS = (
    TransformRule("plain_operations"),
    # modules of adapters are sharded and cast with the rest
    TransformRule("freeze"),
    TransformRule("narrow_weights"),
    # modules are replaced and wrapped before `fully_shard`, which holds on to them
    TransformRule("fp8", after=("plain_operations", "freeze")),
    TransformRule("quantize_aware"),
    TransformRule("compile"),
    TransformRule("tensor_parallel", after=("freeze", "fp8", "quantize_aware", "compile")),
    TransformRule("expert_parallel", after=("tensor_parallel",)),
    # each rank quantizes its shard
    TransformRule("quantize_frozen", after=("tensor_parallel", "expert_parallel")),
    TransformRule("cast", after=("compile", "quantize_frozen")),
    TransformRule("recompute", after=("compile", "cast")),
    TransformRule("fully_shard", after=("tensor_parallel", "expert_parallel", "recompute")),
    TransformRule("initialize", after=("tensor_parallel", "expert_parallel", "fully_shard")),
    TransformRule("context_parallel"),
    TransformRule("uncompiled_attention", after=("context_parallel",)),
)

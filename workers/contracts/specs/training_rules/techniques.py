"""Techniques of a training run, as conditions on its spec."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from workers.contracts.specs.model import ModelSpec
from workers.contracts.specs.plan import SPLIT_BACKWARD, ParallelPlan
from workers.contracts.specs.train import TrainBody


@dataclass(frozen=True, slots=True)
class Combination:
    """What techniques are derived from."""

    plan: ParallelPlan
    model: ModelSpec | None = None
    train: TrainBody | None = None

    @property
    def techniques(self) -> frozenset[str]:
        """The names of `TECHNIQUES` that are in use."""
        return frozenset(name for name, in_use in TECHNIQUES.items() if in_use(self))


def _pipedream(c: Combination) -> bool:
    return c.plan.pp > 1 and c.plan.schedule == "pipedream"


def _packs(train: TrainBody) -> bool:
    return any(options is not None and options.packing for options in (train.sft, train.distill))


def _adapter(c: Combination) -> Any:
    return None if c.train is None else c.train.adapter


def _recipe(c: Combination) -> str:
    return c.plan.chosen_fp8_recipe(compiled=c.train is not None and bool(c.train.compile))


TECHNIQUES: dict[str, Callable[[Combination], bool]] = {
    "tensor_parallel": lambda c: c.plan.tp > 1,
    "context_parallel": lambda c: c.plan.cp > 1,
    "expert_parallel": lambda c: c.plan.ep > 1,
    "experts": lambda c: c.model is not None and bool(c.model.moe),
    "pipedream": _pipedream,
    "no_stashing": lambda c: c.plan.weight_stashing is False,
    "split_backward": lambda c: c.plan.pp > 1 and c.plan.schedule in SPLIT_BACKWARD,
    "bf16": lambda c: c.plan.precision == "bf16",
    "fp16": lambda c: c.plan.precision == "fp16",
    "fp8": lambda c: c.plan.precision == "fp8",
    "block_fp8": lambda c: c.plan.precision == "fp8" and _recipe(c) == "block",
    "torchao_fp8": lambda c: c.plan.precision == "fp8" and _recipe(c) != "block",
    "fp8_recipe": lambda c: c.plan.fp8_recipe is not None,
    "not_fp8": lambda c: c.plan.precision != "fp8",
    "odd_hidden": lambda c: c.model is not None and c.model.hidden % 16 != 0,
    "not_fp16": lambda c: c.plan.precision != "fp16",
    "loss_scale": lambda c: c.plan.loss_scale is not None,
    "narrow_weights": lambda c: c.plan.narrow_weights,
    "rounded_weights": lambda c: c.plan.params_dtype == "bf16",
    "not_adamw": lambda c: c.train is not None and c.train.optimizer.name != "adamw",
    "tied_embeddings": lambda c: c.model is not None and c.model.tie_embeddings,
    "offload": lambda c: c.plan.offload != "none",
    "offload_all": lambda c: c.plan.offload == "all",
    "replicated_weights": lambda c: c.plan.zero < 3 and c.plan.dp * c.plan.cp > 1,
    "unsharded": lambda c: c.plan.zero < 2,
    "dp_replicate": lambda c: c.plan.dp_replicate not in (None, 1),
    "recompute": lambda c: c.plan.recompute != "none",
    "recompute_auto": lambda c: c.plan.recompute == "auto",
    "compile": lambda c: c.train is not None and bool(c.train.compile),
    "policy": lambda c: c.train is not None and c.train.policy is not None,
    "reference": lambda c: c.train is not None and c.train.compares,
    "quantize_aware": lambda c: c.train is not None and c.train.quantize_aware is not None,
    "quantize_aware_int8": lambda c: c.train is not None and c.train.quantize_aware == "int8",
    "frozen": lambda c: c.train is not None and bool(c.train.freeze or c.train.adapter),
    "adapter": lambda c: c.train is not None and c.train.adapter is not None,
    "adapter_dropout": lambda c: _adapter(c) is not None and bool(_adapter(c).dropout),
    "virtual_embeddings": lambda c: (
        _adapter(c) is not None and _adapter(c).method in ("prompt", "p_tuning")
    ),
    "prefix": lambda c: _adapter(c) is not None and _adapter(c).method in ("prefix", "p_tuning_v2"),
    "sequence_parallel": lambda c: c.plan.tp > 1 and c.plan.sequence_parallel,
    "pipeline": lambda c: c.plan.pp > 1,
    "packing": lambda c: c.train is not None and _packs(c.train),
    "pairs": lambda c: c.train is not None and c.train.pairs,
    "paged": lambda c: c.train is not None and c.train.optimizer.paged,
    "nf4": lambda c: _adapter(c) is not None and _adapter(c).storage == "nf4",
}

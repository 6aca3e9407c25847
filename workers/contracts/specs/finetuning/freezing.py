"""Checks of `train.freeze` and `train.adapter` against the model's shape and the plan.

Does not check what the engine can combine (`training_rules`).
"""

from __future__ import annotations

from collections.abc import Iterator

from workers.contracts.base import Problem, problem
from workers.contracts.catalog.adapter_shapes import (
    NF4_BLOCK,
    SAVED_MODULES,
    adapter_shapes,
    block_linears,
)
from workers.contracts.catalog.parameter_shapes import frozen_names, parameter_shapes
from workers.contracts.specs.finetuning.adapters import LOW_RANK, AdapterSpec
from workers.contracts.specs.model import ModelSpec
from workers.contracts.specs.plan import ParallelPlan
from workers.contracts.specs.train import TrainBody


def frozen_problems(
    train: TrainBody, model: ModelSpec | None, plan: ParallelPlan | None
) -> list[Problem]:
    """What is wrong with frozen weights and the adapter; names need a known `model`."""
    problems = list(_fields(train))
    if model is not None:
        problems += _patterns(train, model)
        if train.adapter is not None:
            problems += _adapter(train.adapter, model, plan)
    return problems


def _fields(train: TrainBody) -> Iterator[Problem]:
    adapter = train.adapter
    if adapter is not None and train.freeze:
        yield problem(
            "train.freeze", "an adapter already freezes the model's own weights", "Omit the field."
        )
    if adapter is not None and train.init_from is None:
        yield problem(
            "train.adapter",
            f"{adapter.method} adapts existing weights, but train.init_from is not set",
            'Set init_from to {"path": "..."}, or omit the adapter.',
        )
    if train.reference == "adapter_off" and adapter is None:
        yield problem(
            "train.dpo.reference",
            "adapter_off requires an adapter, but train.adapter is not set",
            "Use initial.",
        )
    elif train.reference == "adapter_off" and adapter is not None and not adapter.is_removable:
        trained = "modules_to_save" if adapter.modules_to_save else adapter.method
        yield problem(
            "train.dpo.reference",
            f"{trained} trains the base weights, so they cannot serve as the reference",
            "Use initial, which holds a copy of them.",
        )
    ratio = train.optimizer.lora_plus_ratio
    if ratio is not None and (adapter is None or adapter.method not in LOW_RANK):
        yield problem(
            "train.optimizer.lora_plus_ratio",
            "LoRA+ sets the rate of the matrices B of low-rank adapters, but this run has no such "
            "adapter",
            "Omit the field, or use an adapter of method lora.",
        )


def _patterns(train: TrainBody, model: ModelSpec) -> Iterator[Problem]:
    if not train.freeze:
        return
    names = list(parameter_shapes(model))
    for place, pattern in enumerate(train.freeze):
        if not frozen_names(names, [pattern]):
            yield problem(
                f"train.freeze.{place}",
                f"{pattern} does not match any of the {len(names)} parameters of {model.name}, "
                "such as "
                f"{names[0]} and {names[1]}",
                "Use a pattern such as blocks.0.*.",
            )
    if len(frozen_names(names, train.freeze)) == len(names):
        yield problem(
            "train.freeze",
            f"all {len(names)} parameters are frozen; no parameter is trained",
            "Use a pattern such as blocks.0.*.",
        )


def _adapter(
    adapter: AdapterSpec, model: ModelSpec, plan: ParallelPlan | None
) -> Iterator[Problem]:
    if not adapter_shapes(model, adapter) and adapter.method != "bitfit":
        yield problem(
            "train.adapter.targets",
            f"{model.name} has none of the linear layers {', '.join(adapter.projections)} outside "
            "routed experts",
            "Use q, k, v and o.",
        )
    joined = {"q", "k", "v"} & set(adapter.projections)
    if adapter.method == "dora" and model.norm == "layernorm" and 0 < len(joined) < 3:
        yield problem(
            "train.adapter.targets",
            f"{', '.join(sorted(joined))} are part of GPT-2's joined c_attn, whose magnitudes PEFT "
            "stores for q, k and v together",
            "Use all of q, k and v, or method lora.",
        )
    modules = {name.split(".")[0] for name in parameter_shapes(model)} - {"blocks"}
    for place, name in enumerate(adapter.modules_to_save):
        if SAVED_MODULES.get(name, name) not in modules:
            yield problem(
                f"train.adapter.modules_to_save.{place}",
                f"{model.name} has no module {name}",
                f"Use {' or '.join(sorted(modules))}.",
            )
    if adapter.method in ("prefix", "p_tuning_v2") and model.attention != "softmax":
        yield problem(
            "train.adapter.method",
            f"{adapter.method} adds keys and values of softmax attention, the model has "
            f"{model.attention}",
            "Use lora or prompt.",
        )
    if adapter.init not in (None, "random"):
        yield problem(
            "train.adapter.init",
            "this engine version starts virtual tokens from the vocabulary or at random",
            "Omit the field, or use random.",
        )
    if adapter.storage is not None:
        yield from _nf4(model, plan)


def _nf4(model: ModelSpec, plan: ParallelPlan | None) -> Iterator[Problem]:
    tp = plan.tp if plan is not None else 1
    for layer in range(model.layers):
        for name, (_, inputs) in block_linears(model, layer).items():
            split = tp if name.rpartition(".")[2] in ("o", "down") else 1
            if inputs % (NF4_BLOCK * split):
                sharded = f" over tp {tp}" if split > 1 else ""
                yield problem(
                    "train.adapter.quantize",
                    f"{name} has {inputs} inputs{sharded}; NF4 requires a multiple of {NF4_BLOCK}",
                    "Use method lora without quantize.",
                )
                return
    if tp > model.kv_heads and model.attention == "softmax":
        yield problem(
            "train.adapter.quantize",
            f"tp {tp} is above kv_heads {model.kv_heads}: ranks would share quantized heads",
            f"Use tp {model.kv_heads} or less.",
        )

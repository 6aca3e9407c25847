"""PEFT's adapter_config.json from an AdapterSpec, and the checks of one that is read.

Does not read tensors.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from workers.contracts.catalog.adapter_shapes import SAVED_MODULES
from workers.contracts.specs.finetuning.adapters import LOW_RANK, AdapterMethod, AdapterSpec
from workers.contracts.specs.model import ModelSpec
from workers.models.errors import WeightsError

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
# the task of a reward model
SCORES = "SEQ_CLS"
# PEFT has no bottleneck adapters and no BitFit
PEFT_TYPES: dict[AdapterMethod, str] = {
    **dict.fromkeys(LOW_RANK, "LORA"),
    "ia3": "IA3",
    "prompt": "PROMPT_TUNING",
    "p_tuning": "P_TUNING",
    "prefix": "PREFIX_TUNING",
    "p_tuning_v2": "PREFIX_TUNING",
    "adapter": "ORRERY-BOTTLENECK",
    "bitfit": "ORRERY-BITFIT",
}
# fields that are read, or do not change a trained adapter's results
_KNOWN = frozenset(
    {
        "alpha_pattern",
        "auto_mapping",
        "base_model_name_or_path",
        "bias",
        "encoder_dropout",
        "encoder_hidden_size",
        "encoder_num_layers",
        "encoder_reparameterization_type",
        "ensure_weight_tying",
        "exclude_modules",
        "fan_in_fan_out",
        "feedforward_modules",
        "inference_mode",
        "init_ia3_weights",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "lora_dropout",
        "megatron_core",
        "modules_to_save",
        "num_attention_heads",
        "num_layers",
        "num_transformer_submodules",
        "num_virtual_tokens",
        "peft_type",
        "peft_version",
        "prefix_projection",
        "prompt_tuning_init",
        "prompt_tuning_init_text",
        "qalora_group_size",
        "r",
        "rank_pattern",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
        "token_dim",
        "tokenizer_kwargs",
        "tokenizer_name_or_path",
        "use_dora",
        "use_rslora",
    }
)
# initial values that leave the base's weights as they are
_INITIAL = (None, True, False, "gaussian", "eva", "orthogonal")


def peft_config(
    adapter: AdapterSpec, model: ModelSpec, *, base: str, modules: dict[str, list[str]]
) -> dict[str, Any]:
    """The configuration of an adapter over `base`.

    `modules`: Hugging Face's names of the adapted modules by kind of parameter (`lora_A`, ...).
    """
    config: dict[str, Any] = {
        "peft_type": PEFT_TYPES[adapter.method],
        "task_type": SCORES if model.scalar_head else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
    }
    theirs = {ours: name for name, ours in SAVED_MODULES.items()}
    saved = [theirs.get(name, name) for name in adapter.modules_to_save]
    if model.scalar_head:
        saved = [*(name for name in saved if name != "lm_head"), "score"]
    if adapter.method in LOW_RANK:
        alpha = adapter.scale * adapter.size**0.5 if adapter.method == "rslora" else None
        return config | {
            "r": adapter.size,
            "lora_alpha": _number(adapter.scale * adapter.size if alpha is None else alpha),
            "lora_dropout": adapter.dropout,
            "target_modules": _targets(modules.get("lora_A", []), model),
            "modules_to_save": saved or None,
            "bias": "none",
            "fan_in_fan_out": _stores_transposed(model),
            "init_lora_weights": True,
            "use_rslora": adapter.method == "rslora",
            "use_dora": adapter.method == "dora",
        }
    if adapter.method == "ia3":
        scaled = modules.get("ia3_l", [])
        inputs = [name for name in scaled if ".mlp." in name or "block_sparse_moe" in name]
        return config | {
            "target_modules": _targets(scaled, model),
            "feedforward_modules": _targets(inputs, model),
            "fan_in_fan_out": _stores_transposed(model),
            "init_ia3_weights": True,
            "modules_to_save": saved or None,
        }
    if adapter.size and adapter.method != "adapter":
        prefix = adapter.method in ("prefix", "p_tuning_v2")
        width = model.kv_heads * model.head_dim if prefix else model.hidden
        config |= {
            "num_virtual_tokens": adapter.size,
            "token_dim": width,
            "num_transformer_submodules": 1,
            "num_attention_heads": model.kv_heads if prefix else model.heads,
            "num_layers": model.layers,
        }
        if adapter.method == "p_tuning":
            reparameterized = {"encoder_reparameterization_type": "MLP", "encoder_num_layers": 2}
            config |= {**reparameterized, "encoder_hidden_size": model.hidden}
        elif prefix:
            config |= {"prefix_projection": False, "encoder_hidden_size": width}
        else:
            config |= {"prompt_tuning_init": "RANDOM"}
        return config
    return config | {"adapter": adapter.to_dict(), "modules_to_save": saved or None}


def read_config(folder: Path) -> dict[str, Any]:
    """The configuration of a folder. Raises WeightsError for one that cannot be computed."""
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} cannot be read: {error}") from None
    kind = config.get("peft_type") if isinstance(config, dict) else None
    if kind not in set(PEFT_TYPES.values()):
        known = ", ".join(sorted(set(PEFT_TYPES.values())))
        raise WeightsError(f"{path} has peft_type {kind}; this engine reads {known}")
    own = kind.startswith("ORRERY-")
    unknown = [
        name
        for name, value in config.items()
        if name not in _KNOWN and value and not (own and name == "adapter")
    ]
    if unknown:
        value = config[unknown[0]]
        raise WeightsError(
            f"{path} has {unknown[0]} {value}, which this engine does not compute; merge the "
            "adapter with PEFT"
        )
    if config.get("init_lora_weights") not in _INITIAL:
        raise WeightsError(
            f"{path} has init_lora_weights {config['init_lora_weights']}, which changed the base's "
            "weights; convert it with PEFT's path_initial_model_for_weight_conversion"
        )
    return dict(config)


def pattern_value(patterns: dict[str, Any] | None, module: str, default: Any) -> Any:
    """PEFT's rank_pattern and alpha_pattern: keys are regular expressions at a name's end."""
    import re

    for key, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return default


def _targets(names: list[str], model: ModelSpec) -> list[str]:
    """The last part of each name; whole names where others would match as well: routed experts,
    and GPT-2's c_proj of attention and MLP.
    """
    if model.moe is not None or _stores_transposed(model):
        return sorted(names)
    return sorted({name.rpartition(".")[2] for name in names})


def _stores_transposed(model: ModelSpec) -> bool:
    """Whether Hugging Face's linear layers are `[in, out]`: GPT-2's Conv1D."""
    return model.norm == "layernorm"


def _number(value: float) -> float | int:
    rounded = round(value, 9)
    return int(rounded) if rounded == int(rounded) else rounded

"""Rotary positions of a configuration, in the keys of transformers 4 and of transformers 5.

Version 4 writes `rope_theta` and `rope_scaling {type | rope_type, factor, …}`, version 5 one
`rope_parameters` (transformers 4.57 and 5.23, `modeling_rope_utils.py`).
Does not depend on families: callers pass their defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workers.contracts.huggingface.fields import ConfigFields

_LENGTH = "original_max_position_embeddings"
# parameters that each type of scaling has besides its factor: Hugging Face's name → RopeScaling's
SCALING_FIELDS: dict[str, dict[str, str]] = {
    "linear": {},
    "dynamic": {},
    "llama3": {
        _LENGTH: "original_max_seq_len",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
    },
    "yarn": {
        _LENGTH: "original_max_seq_len",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "mscale": "mscale",
        "mscale_all_dim": "mscale_all_dim",
    },
}
# keys that do not change the rotation of a scaling type; linear and dynamic ignore the length
_IGNORED = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", _LENGTH}


def read_rope(
    config: ConfigFields, *, theta: float, rotary_share: float = 1.0, interleaved: bool = False
) -> dict[str, Any]:
    """ModelSpec's `rope` of a configuration.

    `theta` and `rotary_share` are the family's default base and default share of rotated head
    dimensions. Raises UnreadableConfig if only part of a head is rotated, for a scaling other than
    linear, dynamic, llama3 and yarn, and for a parameter that RopeScaling does not have.
    """
    parameters: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        value = config.values.get(key)
        if value is None:
            continue
        if not isinstance(value, Mapping):
            raise config.error(
                key, f"is {value!r}", 'Use an object such as {"rope_type": "llama3", …}.'
            )
        if any(isinstance(item, Mapping) for item in value.values()):
            raise config.error(
                key, "differs between layers", "Use a model with one rotation for all layers."
            )
        parameters.update({name: item for name, item in value.items() if item is not None})
    rope = ConfigFields(parameters, f"{config.label}: rope parameters")
    share_keys = ("partial_rotary_factor", "rotary_pct")
    share = config.number(*share_keys, default=rotary_share)
    share = rope.number("partial_rotary_factor", default=share)
    if share != 1.0:
        key = next((key for key in share_keys if config.has(key)), share_keys[0])
        raise config.error(
            key,
            f"is {share:g}: only that share of each head is rotated",
            "Use a model that rotates entire heads (1.0).",
        )
    base = config.number("rope_theta", "rotary_emb_base", default=theta)
    result: dict[str, Any] = {
        "theta": rope.number("rope_theta", default=base),
        "interleaved": interleaved,
    }
    scaling_type = rope.text("rope_type", "type", default="default")
    if scaling_type != "default":
        result["scaling"] = _read_scaling(rope, scaling_type)
    return result


def _read_scaling(rope: ConfigFields, scaling_type: str) -> dict[str, Any]:
    if scaling_type not in SCALING_FIELDS:
        known = ", ".join(SCALING_FIELDS)
        raise rope.error("rope_type", f"is {scaling_type!r}", f"Use one of default, {known}.")
    names = SCALING_FIELDS[scaling_type]
    ignored = _IGNORED | ({"truncate"} if rope.values.get("truncate") is True else set())
    unknown = sorted(set(rope.values) - set(names) - ignored)
    if unknown:
        raise rope.error(
            unknown[0],
            f"is a parameter of {scaling_type} that ModelSpec does not have",
            "Remove it if it is not needed.",
        )
    scaling: dict[str, Any] = {"name": scaling_type, "factor": rope.number("factor")}
    for key, field in names.items():
        if rope.has(key):
            scaling[field] = rope.integer(key) if key == _LENGTH else rope.number(key)
    return scaling

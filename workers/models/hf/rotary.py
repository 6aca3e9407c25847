"""Rotary positions in a `config.json`: `rope_theta` and `rope_scaling` (transformers 4),
`rope_parameters` (5).

Reads both; writes version 4's keys, which version 5 reads too. Does not know families.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workers.contracts.specs.model import ModelSpec
from workers.models.errors import WeightsError
from workers.models.hf.fields import Fields

_LENGTH = ("original_max_position_embeddings", "original_max_seq_len")
# Hugging Face's name and ours of what each kind of scaling is told besides its factor
_KINDS: dict[str, tuple[tuple[str, str], ...]] = {
    "linear": (),
    "dynamic": (),
    "llama3": (
        _LENGTH,
        ("low_freq_factor", "low_freq_factor"),
        ("high_freq_factor", "high_freq_factor"),
    ),
    "yarn": (
        _LENGTH,
        ("beta_fast", "beta_fast"),
        ("beta_slow", "beta_slow"),
        ("mscale", "mscale"),
        ("mscale_all_dim", "mscale_all_dim"),
    ),
}


def read_rope(config: Fields, *, theta: float, interleaved: bool) -> dict[str, Any]:
    """ModelSpec's `rope`. Raises WeightsError for rotations that it does not hold."""
    both: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        given = config.values.get(key, {})
        if not isinstance(given, Mapping) or any(
            isinstance(value, Mapping) for value in given.values()
        ):
            raise config.refuse(key, f"is {given!r}", "one rotation for all layers can be read")
        both |= given
    rope = Fields(both, f"{config.what}: rope")
    for fields in (config, rope):
        fields.want("partial_rotary_factor", 1.0, default=1.0)
    base = rope.number("rope_theta", default=config.number("rope_theta", default=theta))
    found: dict[str, Any] = {"theta": base, "interleaved": interleaved}
    kind = rope.word("rope_type", "type", default="default")
    if kind == "default":
        return found
    if kind not in _KINDS:
        raise rope.refuse(
            "rope_type", f"is {kind!r}", f"one of default, {', '.join(_KINDS)} can be read"
        )
    for key, plain in (("attention_factor", None), ("truncate", True)):
        if rope.values.get(key, plain) != plain:
            raise rope.refuse(
                key,
                f"is {rope.values[key]!r}",
                "the value that follows from the others can be read",
            )
    scaling: dict[str, Any] = {"name": kind, "factor": rope.number("factor")}
    for theirs, ours in _KINDS[kind]:
        if theirs in rope.values:
            scaling[ours] = rope.whole(theirs) if theirs == _LENGTH[0] else rope.number(theirs)
    return {**found, "scaling": scaling}


def write_rope(spec: ModelSpec) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`.

    Raises WeightsError where transformers would extend another context.
    """
    scaling = spec.rope.scaling
    if scaling is None:
        return {"rope_theta": spec.rope.theta, "rope_scaling": None}
    original = scaling.original_max_seq_len
    if scaling.name == "dynamic" and original not in (None, spec.max_seq_len):
        message = (
            f"rope.scaling extends {original} positions, transformers always max_seq_len "
            f"{spec.max_seq_len}"
        )
        raise WeightsError(f"{spec.name}: {message}; set them equal")
    fallback = 8192 if scaling.name == "llama3" else spec.max_seq_len
    told = {"rope_type": scaling.name, "type": scaling.name, "factor": scaling.factor}
    for theirs, ours in _KINDS[scaling.name]:
        value = getattr(scaling, ours)
        if value is None and ours == _LENGTH[1]:
            value = fallback
        if value is not None:
            told[theirs] = value
    return {"rope_theta": spec.rope.theta, "rope_scaling": told}

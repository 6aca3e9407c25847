"""The rotary positions of a Hugging Face configuration, in the keys of transformers 4 and of
transformers 5.

Version 4 writes `rope_theta` and `rope_scaling {type | rope_type, factor, …}`, version 5 one `rope_parameters`; read in
transformers 4.57 and 5.23 (`modeling_rope_utils.py`). Does not know families: their default base is
handed in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.planner.interchange.fields import Fields

# keys of each kind that RopeScaling holds, Hugging Face's name → ours
_COMMON = {"factor": "factor", "original_max_position_embeddings": "original_max_seq_len"}
_KINDS: dict[str, dict[str, str]] = {
    "linear": {"factor": "factor"},
    "dynamic": _COMMON,
    "llama3": {
        **_COMMON,
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
    },
    "yarn": {
        **_COMMON,
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "mscale": "mscale",
        "mscale_all_dim": "mscale_all_dim",
    },
}
# says nothing about the rotation itself
_ELSEWHERE = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}


def rope_of(
    config: Fields, *, theta: float, rotary_share: float = 1.0, interleaved: bool = False
) -> dict[str, Any]:
    """ModelSpec's `rope` of a configuration.

    `theta` and `rotary_share` are the family's defaults: the base, and the share of a head's dims
    that is turned.
    Raises Unreadable where only part of a head is turned, for another scaling than linear, dynamic,
    llama3 or yarn,
    and for a parameter of one that ModelSpec does not hold.
    """
    both = {}
    for key in ("rope_scaling", "rope_parameters"):
        given = config.values.get(key)
        if given is None:
            continue
        if not isinstance(given, Mapping):
            raise config.refuse(
                key, f"is {given!r}", 'an object such as {"rope_type": "llama3", …} is wanted'
            )
        if any(isinstance(value, Mapping) for value in given.values()):
            raise config.refuse(
                key, "differs between layers", "only one rotation for all layers can be read"
            )
        both.update({name: value for name, value in given.items() if value is not None})
    rope = Fields(both, f"{config.what}: rope parameters")
    share = rope.number(
        "partial_rotary_factor",
        default=config.number("partial_rotary_factor", "rotary_pct", default=rotary_share),
    )
    if share != 1.0:
        raise config.refuse(
            "partial_rotary_factor"
            if config.has("partial_rotary_factor") or not config.has("rotary_pct")
            else "rotary_pct",
            f"is {share:g}: only that share of each head is turned by position",
            "ModelSpec turns whole heads, only 1.0 can be read",
        )
    base = rope.number(
        "rope_theta", default=config.number("rope_theta", "rotary_emb_base", default=theta)
    )
    found: dict[str, Any] = {"theta": base, "interleaved": interleaved}
    kind = rope.word("rope_type", "type", default="default")
    if kind != "default":
        found["scaling"] = _scaling(rope, kind)
    return found


def _scaling(rope: Fields, kind: str) -> dict[str, Any]:
    if kind not in _KINDS:
        raise rope.refuse(
            "rope_type", f"is {kind!r}", f"one of default, {', '.join(_KINDS)} can be read"
        )
    names = _KINDS[kind]
    beyond = sorted(set(rope.values) - set(names) - _ELSEWHERE - set(_COMMON))
    if beyond:
        raise rope.refuse(
            beyond[0],
            f"is a parameter of {kind} that ModelSpec does not hold",
            "remove it if it may go",
        )
    rope.number("factor")
    wholes = {"original_max_position_embeddings"}
    values = {
        ours: rope.whole(theirs) if theirs in wholes else rope.number(theirs)
        for theirs, ours in names.items()
        if rope.has(theirs)
    }
    return {"name": kind, **values}

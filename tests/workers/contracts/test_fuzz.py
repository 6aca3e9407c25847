"""Whatever JSON comes in, a contract answers with itself or with sentences, and a legal spec
survives a round trip.
"""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from workers.contracts import ModelSpec, ParallelPlan, RunSpec, spec_problems, validation_problems
from workers.contracts.catalog.counts import parameter_count
from workers.contracts.catalog.model_flops import flops_per_token, lookup_parameters
from workers.contracts.specs.plan import SPLIT_BACKWARD, V_SHAPED

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["train", "auto", "zbv", "mla", "llama-tiny", "adamw", 1, 2, 8])
)
anything = st.recursive(
    scalars,
    lambda part: (
        st.lists(part, max_size=3) | st.dictionaries(st.text(max_size=5), part, max_size=3)
    ),
    max_leaves=5,
)


def document(contract: type[Any], depth: int = 2) -> st.SearchStrategy[dict[str, Any]]:
    """Objects with this contract's own field names, their values sometimes objects of the like."""
    inner = anything
    if depth:
        below = {
            "model": ModelSpec,
            "plan": ParallelPlan,
            "train": RunSpec.model_fields["train"].annotation,
        }
        parts = [
            document(of.__args__[0] if hasattr(of, "__args__") else of, 0) for of in below.values()
        ]
        inner = st.one_of(anything, *parts)
    return st.dictionaries(st.sampled_from(sorted(contract.model_fields)), inner, max_size=8)


@given(document(RunSpec))
@settings(deadline=None)
def test_any_json_is_answered_with_a_spec_or_with_sentences(given_: dict[str, Any]) -> None:
    try:
        spec = RunSpec.from_dict({"kind": "train", "train": {"steps": 1, "seq_len": 8}, **given_})
    except ValidationError as error:
        result = validation_problems(error)
        assert result and all(item.message for item in result)
    else:
        assert all(item.field and item.message for item in spec_problems(spec))
        assert RunSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


@given(document(ParallelPlan, 0))
@settings(deadline=None)
def test_any_plan_is_answered(given_: dict[str, Any]) -> None:
    try:
        plan = ParallelPlan.from_dict(given_)
    except ValidationError as error:
        assert validation_problems(error)
    else:
        assert ParallelPlan.model_validate_json(plan.to_json()) == plan
        if plan.schedule in V_SHAPED and "virtual_stages" not in given_:
            assert plan.virtual_stages == 2 and plan.schedule in SPLIT_BACKWARD


@given(
    layers=st.integers(1, 12),
    heads=st.sampled_from([1, 2, 4, 8]),
    group=st.sampled_from([1, 2, 4]),
    dim=st.sampled_from([8, 16]),
    bias=st.sampled_from([True, False, "qkv"]),
    gated=st.booleans(),
    tied=st.booleans(),
    norm=st.sampled_from(["rmsnorm", "layernorm"]),
    position=st.sampled_from(["rope", "learned", "none"]),
)
@settings(deadline=None)
def test_any_model_counts_and_round_trips(
    layers: int,
    heads: int,
    group: int,
    dim: int,
    bias: Any,
    gated: bool,
    tied: bool,
    norm: str,
    position: str,
) -> None:
    model = ModelSpec.from_dict(
        {
            "layers": layers,
            "hidden": heads * dim,
            "heads": heads,
            "kv_heads": max(1, heads // group),
            "ffn": 24,
            "vocab": 256,
            "max_seq_len": 32,
            "bias": bias,
            "gated_mlp": gated,
            "tie_embeddings": tied,
            "norm": norm,
            "position": position,
        }
    )
    assert ModelSpec.model_validate_json(model.to_json()) == model
    count = parameter_count(model)
    assert count.total == count.active > count.embedding
    assert (
        flops_per_token(model, 32)
        > flops_per_token(model, 16)
        > 6 * (count.total - lookup_parameters(model))
    )

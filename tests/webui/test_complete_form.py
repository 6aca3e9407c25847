"""The new-run form has every field of the contract that people set by hand."""

from __future__ import annotations

import typing
from collections.abc import Iterator

from pydantic import BaseModel

from webui.forms.spec_fields import FIELDS, FIELDS_BY_PATH
from webui.forms.spec_form import spec_of, values_of
from workers.contracts import RunSpec
from workers.contracts.specs.plan import ParallelPlan

# fields without an own input: path or beginning of a path → why
ELSEWHERE = {
    "model.": "the choice of a model, its folder, or its JSON",
    "train.init_from": "the choice of weights",
    "data.": "the choice of data; sources and tokenizers to train are JSON",
    "train.eval.data": "JSON: validation uses the training data by default",
    "benchmark.optimizer": "JSON: a benchmark measures speed, whatever the rate is",
    "benchmark.clip_norm": "JSON: as the optimizer of a benchmark",
    "train.evaluate": "JSON: the form starts the evaluation with its usual numbers",
    "train.samples": "JSON: the form sets how many samples are written",
    "train.accumulate": "follows from the global batch",
    "train.checkpoint.async_": "written as async",
    "evaluate.stop": "JSON",
    "evaluate.judge": "JSON: the judge is a run of this server or named by its URL",
}
FINE_TUNING = ("template", "double_quant", "init")  # of an objective or adapter: JSON


def contract_paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted paths of all values of a contract; objects with an input of their own are values."""
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        parts = typing.get_args(field.annotation) or (field.annotation,)
        inner = [one for one in parts if isinstance(one, type) and issubclass(one, BaseModel)]
        if inner and (path not in FIELDS_BY_PATH or path == "plan"):
            for one in inner:
                yield from contract_paths(one, f"{path}.")
        else:
            yield path


def test_every_field_that_people_set_has_an_input() -> None:
    missing = sorted(
        path
        for path in set(contract_paths(RunSpec))
        if path not in FIELDS_BY_PATH
        and path != "kind"
        and not path.startswith(tuple(ELSEWHERE))
        and not path.endswith(FINE_TUNING)
    )
    assert not missing, f"no input in the form, no reason in ELSEWHERE: {missing}"
    plan = {f"plan.{name}" for name in ParallelPlan.model_fields} - FIELDS_BY_PATH.keys()
    assert plan == {"plan.loss_scale"}, "its four numbers have inputs"


def test_every_input_has_a_label_and_no_path_twice() -> None:
    paths = [field.path for field in FIELDS]
    assert len(paths) == len(set(paths)) and all(field.label for field in FIELDS)


def test_trials_are_set_for_automatic_plans_only() -> None:
    autotune = {"top_k": 4, "steps": 10, "max_share": 0.1}
    train = {"steps": 100, "seq_len": 64}
    automatic = {"kind": "train", "plan": "auto", "train": train, "autotune": autotune}
    values = values_of(automatic)
    assert spec_of(values, automatic)["autotune"] == autotune
    assert "autotune" not in spec_of({**values, "plan": "hand"}, automatic)
    assert "autotune" not in spec_of({**values, "autotune.top_k": ""}, automatic)
    assert "autotune" not in spec_of({**values, "kind": "benchmark"}, automatic)


def test_rare_plan_fields_survive_the_form() -> None:
    plan = {
        "dp": 4,
        "pp": 2,
        "dp_replicate": 2,
        "precision": "fp16",
        "schedule": "pipedream",
        "recompute": "auto",
        "recompute_budget_bytes": 1_000_000,
        "stage_layers": [3, 1],
        "weight_stashing": False,
        "vertical_sync": True,
        "reduce_dtype": "fp32",
        "loss_scale": {"initial": 1024, "growth_interval": 100, "growth": 4, "backoff": 0.25},
    }
    optimizer = {"name": "muon", "momentum": 0.9, "nesterov": False, "ns_steps": 4}
    schedule = {"name": "wsd", "decay_steps": 5}
    train = {"steps": 9, "seq_len": 64, "optimizer": optimizer, "lr_schedule": schedule}
    spec = {"kind": "train", "model": "llama-tiny", "plan": plan, "train": train}
    spec |= {"data": {"preset": "shakespeare"}}
    spec |= {"resources": {"hang_s": 60}, "retries": {"lost": 3}}
    assert spec_of(values_of(spec), {}) == spec
    # a field that its choice hides leaves the spec
    values = values_of(spec) | {"plan.precision": "bf16", "plan.schedule": "1f1b"}
    changed = spec_of(values, spec)["plan"]
    assert "loss_scale" not in changed and "weight_stashing" not in changed

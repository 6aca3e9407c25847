"""A loop that reads a step's numbers during the next step trains as one that reads them at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.training.conftest import final_weights, make_spec, relative
from tests.workers.training.pool import Result, _run, ended_process_group
from workers.training.loop import late_reads
from workers.training.loop.step_sums import Sums
from workers.training.loop.train import Loop
from workers.training.optim import build, skips_on_device
from workers.training.optim.scaled_adamw import ScaledAdamW
from workers.training.optim.zero1 import Zero1Optimizer

STEPS = 7


def spec(plan: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    train = {
        "steps": STEPS,
        "clip_norm": 0.5,
        "log_every": 2,
        "checkpoint": {"every_steps": 3, "async": False},
        "eval": {"every_steps": 4, "batches": 1},
        **more,
    }
    return make_spec(None, {"micro_batch_size": 1, "global_batch_size": 2, **(plan or {})}, **train)


@contextmanager
def device_decides(*, late: bool) -> Iterator[list[tuple[str, int]]]:
    """Runs train with the update of a GPU; yields the order of passes and reads, by step."""
    order: list[tuple[str, int]] = []
    passes, total = Loop._forward_backward, Sums.total

    def counted_passes(self: Loop) -> Any:
        order.append(("passes", self.step + 1))
        return passes(self)

    def counted_total(self: Sums) -> Any:
        order.append(("read", sum(name == "read" for name, _ in order) + 1))
        return total(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(late_reads, "_runs_ahead", lambda device: late)
        patch.setattr(build, "fused_adamw", lambda parameters: ScaledAdamW)
        patch.setattr(Loop, "_forward_backward", counted_passes)
        patch.setattr(Sums, "total", counted_total)
        yield order


def train_in_rank(directory: str, spec: dict[str, Any], late: bool) -> dict[str, Any]:
    """In a rank of a pool."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    with device_decides(late=late):
        return _run(spec, Path(directory), {name: os.environ[name] for name in names})


def train_here(spec: dict[str, Any], directory: Path, *, late: bool) -> tuple[Result, list[Any]]:
    with ended_process_group(), device_decides(late=late) as order:
        return Result([_run(spec, directory, {})], directory), order


def equal(one: Result, other: Result) -> None:
    assert [p["step"] for p in one.points()] == [p["step"] for p in other.points()]
    assert [p["tokens"] for p in one.points()] == [p["tokens"] for p in other.points()]
    for name in ("loss", "grad_norm", "val_loss", "lr"):
        assert one.values(name) == pytest.approx(other.values(name), rel=1e-6), name
    for name, weight in final_weights(one, STEPS).items():
        assert relative(weight, final_weights(other, STEPS)[name]) <= 1e-6, name


def test_the_next_passes_are_launched_before_a_step_is_read(tmp_path: Path) -> None:
    late, order = train_here(spec(), tmp_path / "late", late=True)
    at_once, _ = train_here(spec(), tmp_path / "at once", late=False)
    assert late.outcomes == at_once.outcomes and late.outcomes[0]["class"] == "ok"
    equal(late, at_once)
    places = {each: number for number, each in enumerate(order)}
    boundaries = {3, 4, 6, 7}  # checkpoints, a validation and the end are read at once
    for step in range(1, STEPS):
        launched = places["passes", step + 1] < places["read", step]
        assert launched == (step not in boundaries), step


@pytest.mark.parametrize("plan", [{"dp": 2, "zero": 1}, {"dp": 2, "zero": 3}], ids=["1", "3"])
def test_under_zero(plan: dict[str, Any], pools: Callable[[int], Any], tmp_path: Path) -> None:
    results = []
    for late in (True, False):
        directory = tmp_path / str(late)
        call = f"{__name__}:train_in_rank"
        outcomes = pools(2).call(call, directory=str(directory), spec=spec(plan), late=late)
        assert [each["class"] for each in outcomes] == ["ok", "ok"], outcomes
        results.append(Result(outcomes, directory))
    equal(*results)


def test_a_step_that_is_not_finite_is_named_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[torch.Tensor] = []
    update = ScaledAdamW.step

    def poisoned(self: ScaledAdamW, *given: Any, **options: Any) -> None:
        first, second = self.param_groups[0]["params"][:2]
        update(self, *given, **options)
        steps.append(second.detach().clone())
        if len(steps) == 2:  # the third step has no finite number
            first.data.fill_(torch.nan)

    monkeypatch.setattr(ScaledAdamW, "step", poisoned)
    result, _ = train_here(spec(eval=None, checkpoint=None), tmp_path, late=True)
    [outcome] = result.outcomes
    assert outcome["class"] == "numerics" and "at step 3" in outcome["reason"], outcome
    assert "embed" in outcome["reason"], "the first module, from the repeated step"
    assert len(steps) == 3, "the fourth step was not updated"
    assert torch.equal(steps[2], steps[1]) and not torch.equal(steps[1], steps[0])
    [event] = [each["data"] for each in result.events() if each["type"] == "non_finite"]
    assert event["step"] == 3


def test_what_a_step_must_know_of_the_one_before_is_read_at_once(tmp_path: Path) -> None:
    _, order = train_here(spec({"precision": "fp16"}), tmp_path, late=True)
    assert order[:4] == [("passes", 1), ("read", 1), ("passes", 2), ("read", 2)]


def test_wrappers_pass_on_what_their_rule_accepts() -> None:
    weights = [torch.nn.Parameter(torch.ones(3))]
    fused, plain = ScaledAdamW(weights), torch.optim.AdamW(weights)
    assert skips_on_device(fused) and not skips_on_device(plain)
    for rule, expected in ((fused, True), (plain, False)):
        wrapper = Zero1Optimizer.__new__(Zero1Optimizer)
        wrapper.optim = rule
        assert wrapper.accepts_factor == wrapper.skips_on_device == expected

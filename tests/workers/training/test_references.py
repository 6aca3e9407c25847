"""References of preference optimization next to adapters: off, a copy, or other weights."""

from __future__ import annotations

import math

import pytest

from tests.matrix import select
from tests.workers.training.conftest import TINY, make_spec
from tests.workers.training.row_ranks import run_rows
from tests.workers.training.test_preference import ONE, STEPS, spec
from workers.models.weights.manifest import step_folder


@pytest.fixture(scope="module")
def base(train, tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    train(make_spec(steps=2, checkpoint={"every_steps": 2, "async": False}), folder)
    return {"path": str(folder / "checkpoints" / step_folder(2))}


def adapted(plan, base, *, adapter, reference=None, **more):
    options = {"loss": "dpo", "beta": 0.5, "reference": reference}
    optimizer = {"name": "sgd", "lr": 0.2, "momentum": 0.9}
    given = {"init_from": base, "adapter": adapter, "optimizer": optimizer, "clip_norm": None}
    return spec(plan, options=options, **{**given, **more})


def losses(result):
    assert {each["class"] for each in result.outcomes} == {"ok"}, result.outcomes
    return result.values("loss")


LORA, DORA = {"method": "lora", "rank": 4}, {"method": "dora", "rank": 4}
PLANS = [
    (LORA, {"dp": 2, "zero": 3}),
    (DORA, {"tp": 2}),
    (LORA, {"pp": 2, "cp": 2}),
    ({"method": "ia3"}, {"dp": 2, "zero": 0}),
    ({"method": "adapter", "rank": 4}, {"pp": 2}),
    ({"method": "prefix", "rank": 3}, {"dp": 2, "zero": 2}),
]


@pytest.mark.parametrize(("adapter", "plan"), select(PLANS, [0, 2]), ids=str)
def test_without_its_adapter_the_model_is_the_reference(adapter, plan, base, pools, tmp_path):
    off = run_rows(pools, adapted(plan, base, adapter=adapter), tmp_path / "off", ONE)
    assert not off.points()[0]["values"].get("memory/reference_bytes")
    # the base's own weights, in one process
    other = run_rows(
        pools, adapted({}, base, adapter=adapter, reference=base), tmp_path / "path", ONE
    )
    assert losses(off) == pytest.approx(losses(other), rel=1e-5, abs=1e-6)
    assert abs(losses(off)[-1] - losses(off)[0]) > 1e-6
    for name in ("dpo/margin", "dpo/logp_chosen", "val_loss", "grad_norm"):
        assert off.values(name) == pytest.approx(other.values(name), rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize(
    "adapter", [{"method": "bitfit"}, {"method": "prefix", "rank": 3}], ids=str
)
def test_a_copy_of_the_adapted_model_is_a_reference(adapter, base, pools, tmp_path):
    made = adapted({}, base, adapter=adapter, reference="initial")
    alone = run_rows(pools, made, tmp_path / "one", ONE)
    first = alone.points()[0]["values"]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["memory/reference_bytes"] == pytest.approx(first["memory/params_bytes"], rel=0.05)
    assert len(losses(alone)) == STEPS and losses(alone)[-1] < math.log(2)
    sharded = adapted({"dp": 2, "zero": 3}, base, adapter=adapter, reference="initial")
    assert losses(run_rows(pools, sharded, tmp_path / "two", ONE)) == pytest.approx(
        losses(alone), rel=1e-5
    )


def test_an_adapter_over_4_bits_has_the_reference_in_4_bits(pools, train, tmp_path):
    wide = {**TINY, "hidden": 64, "ffn": 128}
    train(make_spec(wide, steps=1, checkpoint={"every_steps": 1}), tmp_path / "base")
    base = {"path": str(tmp_path / "base" / "checkpoints" / step_folder(1))}
    for reference in ("adapter_off", "initial"):
        made = adapted({}, base, adapter={"method": "qlora", "rank": 4}, reference=reference)
        result = run_rows(pools, {**made, "model": wide}, tmp_path / reference, ONE)
        assert losses(result)[0] == pytest.approx(math.log(2), abs=1e-6)

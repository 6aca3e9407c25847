"""Frozen weights and adapters give one process's numbers under every plan, and resume on others."""

from __future__ import annotations

import json

import pytest
import torch

from tests.matrix import FULL
from tests.workers.training.conftest import TINY, final_weights, make_spec, relative
from workers.contracts.catalog.adapter_shapes import adapter_shapes
from workers.contracts.catalog.parameter_shapes import element_count, frozen_names
from workers.contracts.specs.finetuning.adapters import AdapterSpec
from workers.contracts.specs.model import ModelSpec
from workers.models.adapters.peft_files import check_base, read_adapter
from workers.models.convert import main
from workers.models.errors import WeightsError
from workers.models.weights.checkpoint_table import read_table
from workers.models.weights.manifest import step_folder
from workers.models.weights.open import open_weights

BATCH = {"micro_batch_size": 1, "global_batch_size": 4}
# tp 2 needs 128 inputs for blocks of 64
WIDE = {**TINY, "name": "wide", "hidden": 128, "ffn": 128}
ADAPTERS = {
    "lora": {"method": "lora", "rank": 4},
    "dora": {"method": "dora", "rank": 4},
    "rslora": {"method": "rslora", "rank": 4, "targets": ["q", "o"], "modules_to_save": ["head"]},
    "ia3": {"method": "ia3"},
    "bitfit": {"method": "bitfit"},
    "adapter": {"method": "adapter", "rank": 4},
    "prompt": {"method": "prompt", "rank": 3},
    "p_tuning": {"method": "p_tuning", "rank": 3},
    "prefix": {"method": "prefix", "rank": 3},
}
PLANS = [
    {"dp": 2, "zero": 0},
    {"dp": 2, "zero": 1},
    {"dp": 2, "zero": 2},
    {"dp": 2, "zero": 3, "recompute": "full"},
    {"tp": 2},
    {"tp": 2, "sequence_parallel": True, "recompute": "selective"},
    {"pp": 2},
    {"cp": 2},
]
# DoRA has all parts of LoRA, and norms of whole columns, which every sharding changes
SELECTED = {
    "dora": [PLANS[1], PLANS[3], *PLANS[5:]],
    "lora": [PLANS[3], PLANS[5]],
    "adapter": [PLANS[3], PLANS[5]],
    "prompt": [PLANS[2], PLANS[4]],
    "p_tuning": [PLANS[2], PLANS[4]],
}


@pytest.fixture(scope="module")
def base(train, tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    result = train(make_spec(plan=BATCH, steps=2, checkpoint={"every_steps": 2}), folder)
    assert result.outcomes[0]["class"] == "ok", result.outcomes
    return folder / "checkpoints" / step_folder(2)


def spec(base, plan=None, **more):
    init = {"init_from": {"path": str(base)}} if base else {}
    # weights are linear in the gradients, which AdamW's first steps are not
    lr = {"name": "sgd", "lr": 0.3, "momentum": 0.9}
    options = {"steps": 3, "checkpoint": {"every_steps": 3}, "optimizer": lr, **init, **more}
    return make_spec(plan={**BATCH, **(plan or {})}, **options)


def losses(result):
    assert {each["class"] for each in result.outcomes} == {"ok"}, result.outcomes
    return result.values("loss")


def folder_of(result, step=3):
    return result.directory / "checkpoints" / step_folder(step)


def close(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert relative(ours[name], theirs[name]) < 1e-5, name


def adapter_tensors(folder):
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")


@pytest.mark.parametrize("method", ADAPTERS)
def test_an_adapter_is_the_same_under_every_plan(method, base, train, tmp_path):
    chosen = SELECTED.get(method, [PLANS[3], PLANS[4], PLANS[6]])
    if FULL and method in ("lora", "dora"):
        chosen = PLANS
    alone = train(spec(base, adapter=ADAPTERS[method]), tmp_path / "alone")
    first = losses(alone)
    expected = adapter_tensors(folder_of(alone))
    for index, plan in enumerate(chosen):
        result = train(spec(base, plan, adapter=ADAPTERS[method]), tmp_path / str(index))
        assert losses(result) == pytest.approx(first, rel=1e-5), plan
        close(adapter_tensors(folder_of(result)), expected)


@pytest.fixture(scope="module")
def wide_base(train, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wide")
    train(make_spec(WIDE, BATCH, steps=1, checkpoint={"every_steps": 1}), folder)
    return folder / "checkpoints" / step_folder(1)


@pytest.mark.parametrize("quantize", [{"method": "qlora"}, {"method": "dora", "quantize": "nf4"}])
def test_quantized_weights_are_the_same_under_every_plan(quantize, wide_base, train, tmp_path):
    def run(name, **plan):
        document = {**spec(wide_base, plan, adapter={**quantize, "rank": 4}), "model": WIDE}
        return train(document, tmp_path / name)

    alone = run("alone")
    expected = adapter_tensors(folder_of(alone))
    assert alone.values("memory/params_bytes")[-1] < 0.6 * 4 * 350_000
    for plan in ({"dp": 2, "zero": 3}, {"tp": 2, "recompute": "full"}):
        result = run(str(plan), **plan)
        assert losses(result) == pytest.approx(losses(alone), rel=1e-5), plan
        close(adapter_tensors(folder_of(result)), expected)
    # the merged weights are over the dequantized base
    merged, plain = open_weights(folder_of(alone)), open_weights(wide_base)
    name = "blocks.0.mlp.up.weight"
    stored = plain.read(name)
    assert 0.05 < float((merged.exact(name, stored) - stored).norm() / stored.norm()) < 0.3


def test_an_adapter_is_merged_into_16_bits_with_its_error(base, train, tmp_path, capsys):
    half = tmp_path / "half"
    assert main([str(base), str(half), "--to", "hf"]) == 0
    document = spec(half, {"precision": "bf16"}, adapter={"rank": 4})
    result = train(document, tmp_path / "lora")
    losses(result)
    assert main([str(folder_of(result)), str(tmp_path / "merged"), "--to", "hf"]) == 0
    record = json.loads((tmp_path / "merged" / "merge.json").read_text())
    assert record["base"] == str(half) and record["peft_type"] == "LORA"
    assert record["relative"] < 1e-6 and record["logits"] < 1e-4
    assert "of the adapter's change, logits by at most" in capsys.readouterr().out
    assert open_weights(tmp_path / "merged").spec.hidden == TINY["hidden"]


FROZEN = {
    "lower layers": ["embed.*", "blocks.0.*"],
    "head and norms": ["head.*", "*norm*"],
}


@pytest.mark.parametrize("what", FROZEN)
def test_frozen_weights_stay_and_the_rest_is_the_same_under_every_plan(what, base, train, tmp_path):
    alone = train(spec(base, freeze=FROZEN[what]), tmp_path / "alone")
    before, expected = open_weights(base), final_weights(alone, 3)
    frozen = [name for name in expected if torch.equal(expected[name], before.read(name))]
    assert set(frozen) == frozen_names(list(expected), FROZEN[what])
    for plan in [{"pp": 2}, {"dp": 2, "zero": 3, "offload": "all"}, {"dp": 2, "zero": 2}]:
        result = train(spec(base, plan, freeze=FROZEN[what]), tmp_path / str(plan))
        assert losses(result) == pytest.approx(losses(alone), rel=1e-5), plan
        close(final_weights(result, 3), expected)


@pytest.mark.parametrize("plan", [{}, {"ep": 2, "dp": 2, "zero": 0}, {"ep": 2, "dp": 2, "zero": 2}])
def test_experts_are_frozen_and_have_no_states(plan, train, tmp_path):
    moe = {"experts": 4, "top_k": 2, "expert_ffn": 48}
    model = {**TINY, "moe": moe}
    document = make_spec(
        model, {**BATCH, **plan}, freeze=["blocks.*.experts.*"], checkpoint={"every_steps": 4}
    )
    result = train(document, tmp_path / "run")
    losses(result)
    stored = read_table(folder_of(result, 4)).state_dict_metadata
    assert any("experts" in name for name in stored if name.startswith("model."))
    assert not any("experts" in name for name in stored if name.startswith("optim."))


def test_frozen_weights_are_stored_in_16_bits(base, train, tmp_path):
    full = train(spec(base, {"precision": "bf16"}), tmp_path / "full")
    lora = train(spec(base, {"precision": "bf16"}, adapter={"rank": 4}), tmp_path / "lora")
    sizes = [run.values("memory/params_bytes")[-1] for run in (full, lora)]
    added = element_count(adapter_shapes(ModelSpec.from_dict(TINY), AdapterSpec(rank=4)))
    assert sizes[1] == sizes[0] / 2 + 4 * added
    assert lora.values("memory/grads_bytes")[-1] == 4 * added
    assert lora.values("memory/optimizer_bytes")[-1] == pytest.approx(4 * added, rel=0.02)


def test_an_adapter_resumes_on_other_ranks_over_its_own_base(base, train, tmp_path):
    given = {"adapter": ADAPTERS["dora"], "checkpoint": {"every_steps": 1, "keep": 9}}
    alone = train(spec(base, **given), tmp_path / "alone")
    stored = read_table(folder_of(alone)).state_dict_metadata
    assert all(".lora_" in name for name in stored)
    for number, plan in enumerate(({"dp": 2, "zero": 3}, {"tp": 2}, {"pp": 2})):
        place = tmp_path / str(number)
        again = train(spec(base, plan, **given), place, ORRERY_RESUME=str(folder_of(alone, 1)))
        assert losses(again) == pytest.approx(losses(alone)[1:], rel=1e-5)
        close(adapter_tensors(folder_of(again)), adapter_tensors(folder_of(alone)))
    other = train(make_spec(plan=BATCH, seed=9, checkpoint={"every_steps": 4}), tmp_path / "other")
    refused = train(
        spec(folder_of(other, 4), **given), tmp_path / "x", ORRERY_RESUME=str(folder_of(alone, 1))
    )
    assert "other weights" in refused.outcomes[0]["reason"]
    with pytest.raises(WeightsError, match=r"weights of .* differ"):
        check_base(
            read_adapter(folder_of(alone), ModelSpec.from_dict(TINY)),
            open_weights(folder_of(other, 4)),
        )


def test_lora_plus_multiplies_the_rate_of_b(base, train, tmp_path):
    optimizer = {"name": "sgd", "lr": 0.1}
    first = train(
        spec(
            base, adapter={"rank": 4}, steps=1, optimizer=optimizer, checkpoint={"every_steps": 1}
        ),
        tmp_path / "plain",
    )
    optimizer = {**optimizer, "lora_plus_ratio": 4.0}
    plus = train(
        spec(
            base, adapter={"rank": 4}, steps=1, optimizer=optimizer, checkpoint={"every_steps": 1}
        ),
        tmp_path / "plus",
    )
    plain, faster = adapter_tensors(folder_of(first, 1)), adapter_tensors(folder_of(plus, 1))
    # of a step from B = 0 with weight decay 0, only B moves
    close(
        {n: t for n, t in faster.items() if "lora_B" in n},
        {n: 4 * t for n, t in plain.items() if "lora_B" in n},
    )

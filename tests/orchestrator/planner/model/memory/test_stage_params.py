"""Parameters of pipeline ranks sum to the model for every preset, without copies and padding."""

from __future__ import annotations

import numpy as np
import pytest

import orchestrator.planner.model.memory.model_states  # noqa: F401  registers the terms
from tests.orchestrator.planner.predicted import predicted
from workers.contracts.catalog.counts import parameter_count
from workers.contracts.catalog.presets import PRESETS, preset


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_one_device_holds_the_whole_model(name):
    assert predicted(name)["stage_params"].max() == parameter_count(preset(name)).total


@pytest.mark.parametrize("name", sorted(PRESETS))
@pytest.mark.parametrize(
    "plan",
    [
        {"pp": 2},
        {"pp": 5},
        {"pp": 2, "schedule": "interleaved_1f1b", "virtual_stages": 2, "global_batch_size": 4},
        {"pp": 2, "schedule": "dualpipev", "global_batch_size": 4},
        {"pp": 2, "schedule": "zbv"},
    ],
    ids=lambda plan: "-".join(map(str, plan.values())),
)
def test_pipeline_ranks_add_up_to_the_model(name, plan):
    spec = preset(name)
    # a folded rank has both ends
    copied = spec.tie_embeddings and plan.get("schedule") not in ("zbv", "dualpipev")
    whole = parameter_count(spec).total + (spec.vocab * spec.hidden if copied else 0)
    assert predicted(name, plan)["stage_params"].sum() == whole


@pytest.mark.parametrize(
    "name", ["llama3-8b", "gpt2-124m", "qwen3-8b", "deepseek-v3", "mixtral-8x7b"]
)
def test_tensor_parallel_ranks_split_what_has_heads_or_width_and_copy_the_rest(name):
    spec, count, tp = preset(name), parameter_count(preset(name)), 2
    split, row = predicted(name, {"tp": tp}), predicted(name)
    whole = {
        column: float(row[column][0])
        for column in (
            "params_norms",
            "params_attention_whole",
            "params_router",
            "params_dense_whole",
            "params_shared_whole",
            "params_final_norm",
            "params_positions",
        )
    }
    copied = spec.layers * (whole["params_norms"] + whole["params_attention_whole"])
    copied += count.moe_layers * (whole["params_router"] + whole["params_shared_whole"])
    copied += count.dense_layers * whole["params_dense_whole"]
    copied += whole["params_final_norm"] + whole["params_positions"]
    padded = (-spec.vocab % tp) * spec.hidden * (1 if spec.tie_embeddings else 2)
    assert tp * split["stage_params"].max() == count.total + copied + padded


@pytest.mark.parametrize(("using", "share"), [("megatron", 1 / 4), ("orrery", 1.0)])
def test_key_and_value_heads_are_copied_beyond_their_number(using, share):
    """Four of them on eight ranks: Megatron's ranks hold one each, this engine's all of them."""
    four, eight = (
        predicted("qwen3-30b-a3b", {"tp": tp}, using=using)["attention_params"][0] for tp in (4, 8)
    )
    kv = predicted("qwen3-30b-a3b")["params_attention_kv"][0]
    assert predicted("qwen3-30b-a3b")["kv_heads"][0] == 4
    assert eight - share * kv == pytest.approx((four - kv / 4 + 2 * 128 + 2 * 2048) / 2)


def test_a_vocabulary_is_padded_to_the_multiple_times_tp():
    megatron = predicted("gpt3-175b", {"tp": 8}, using="megatron")
    assert megatron["local_vocab"][0] * 8 == 51200  # 50,257 tokens, as in the papers on Megatron-LM
    assert predicted("gpt3-175b", {"tp": 8})["local_vocab"][0] * 8 == 50264
    assert predicted("gpt3-175b")["local_vocab"][0] == 50257


def test_experts_are_spread_over_expert_parallel_ranks_and_sharded_among_those_left():
    plan = {"dp": 64, "ep": 16, "zero": 1, "precision": "bf16"}
    table = predicted("deepseek-v3", plan, using="megatron")
    count = parameter_count(preset("deepseek-v3"))
    experts = count.moe_layers * count.expert * 256
    assert table["expert_stage_params"].max() == experts / 16
    dense = table["dense_stage_params"].max()
    assert table["optimizer_bytes"].max() == pytest.approx(12 * (dense / 64 + experts / 16 / 4))


@pytest.mark.parametrize(
    ("layers", "hidden", "billions"), [(24, 2304, 1.7), (40, 6144, 18.4), (128, 25600, 1008.0)]
)
def test_gpt_of_the_megatron_paper(layers, hidden, billions):
    """Narayanan et al.

    2021 (arXiv 2104.04473), table 1, of ten rows the first, one in the middle and the last.
    """
    spec = preset("gpt3-175b").model_copy(
        update={
            "layers": layers,
            "hidden": hidden,
            "heads": hidden // 128,
            "kv_heads": hidden // 128,
            "head_dim": 128,
            "ffn": 4 * hidden,
            "vocab": 51200,
        }
    )
    assert round(float(np.max(predicted(spec)["stage_params"])) / 1e9, 1) == pytest.approx(
        billions, abs=0.05
    )

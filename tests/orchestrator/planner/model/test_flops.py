"""Model FLOPs against the contracts' own count, hardware FLOPs against the formulas and ratios of
papers.
"""

from __future__ import annotations

import pytest

import orchestrator.planner.model.time.step_time  # noqa: F401  registers the terms
from tests.orchestrator.planner.predicted import predicted
from workers.contracts.catalog.model_flops import flops_per_token
from workers.contracts.catalog.presets import PRESETS, preset
from workers.contracts.specs.model import ModelSpec


def gpt(layers: int, hidden: int, heads: int) -> ModelSpec:
    """As in NVIDIA's papers: vocabulary 51,200, sequences of 2,048."""
    sizes = {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": hidden // heads,
    }
    return preset("gpt3-175b").model_copy(
        update={**sizes, "ffn": 4 * hidden, "vocab": 51200, "max_seq_len": 2048}
    )


@pytest.mark.parametrize("name", sorted(PRESETS))
@pytest.mark.parametrize("attention", ["full", "causal"])
def test_model_flops_are_the_contracts(name, attention):
    model = preset(name)
    table = predicted(
        model,
        {"global_batch_size": 3},
        seq_len=512,
        using={"name": "orrery", "attention_flops": attention},
    )
    per_token = flops_per_token(model, 512, attention=attention)
    assert table["model_flops_per_token"][0] == per_token
    assert table["model_flops"][0] == per_token * 3 * 512


@pytest.mark.parametrize(
    ("layers", "hidden", "heads"), [(48, 6144, 64), (96, 12288, 96), (105, 20480, 128)]
)
def test_full_recomputation_counts_as_narayanan(layers, hidden, heads):
    """arXiv 2104.04473, eq.

    3: 96 B s l h^2 (1 + s/6h + V/16lh) and, without recomputation, 72 (1 + s/6h + V/12lh).
    """
    model, s, v = gpt(layers, hidden, heads), 2048, 51200
    table = predicted(model, {"recompute": "full"}, seq_len=s)
    square = layers * hidden**2 * s
    hardware = 96 * square * (1 + s / (6 * hidden) + v / (16 * layers * hidden))
    request_list = 72 * square * (1 + s / (6 * hidden) + v / (12 * layers * hidden))
    # biases and norms are in ours
    assert table["hardware_flops"][0] == pytest.approx(hardware, rel=1e-3)
    assert table["model_flops"][0] == pytest.approx(request_list, rel=1e-3)


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "ratio"),
    [(48, 6144, 64, 43.7 / 41.5), (96, 12288, 96, 52.8 / 51.4), (105, 20480, 128, 57.0 / 56.0)],
)
def test_selective_recomputation_counts_as_published(layers, hidden, heads, ratio):
    """arXiv 2205.05198, table 5: HFU over MFU; what really runs again is a third of that, and so
    Orrery reports it.
    """
    table = predicted(gpt(layers, hidden, heads), {"recompute": "selective"}, using="megatron")
    assert table["hfu"][0] / table["mfu"][0] == pytest.approx(ratio, abs=3e-3)
    counted, ran = table["hfu"][0] - table["mfu"][0], table["hfu_executed"][0] - table["mfu"][0]
    assert ran == pytest.approx(counted / 3)
    own = predicted(gpt(layers, hidden, heads), {"recompute": "selective"}, using="orrery")
    assert own["hfu"][0] == pytest.approx(own["hfu_executed"][0])


def test_auto_recomputation_lies_between_none_and_full():
    def executed(**more: object) -> float:
        return float(
            predicted("llama3-8b", {"micro_batch_size": 4, "precision": "bf16", **more})[
                "executed_flops"
            ][0]
        )

    none, full = executed(), executed(recompute="full")
    assert none < executed(recompute="auto", recompute_budget_bytes=20 * 2**30) < full


def test_utilization_is_flops_over_time_and_peak():
    table = predicted("llama3-8b", {"dp": 8, "zero": 3, "precision": "bf16"})
    rate = table["model_flops"][0] / table["step_time_s"][0] / 8
    assert table["tflops_per_device"][0] == pytest.approx(rate / 1e12)
    assert table["mfu"][0] == pytest.approx(rate / 989.4e12)
    assert table["hfu"][0] == table["mfu"][0]  # nothing is recomputed

"""Volumes as the papers count them, and the time of collectives against published measurements."""

from __future__ import annotations

from typing import Any

import pytest

import orchestrator.planner.model.time.step_time  # noqa: F401  registers the terms
from tests.orchestrator.planner.predicted import predicted
from workers.contracts.catalog.counts import parameter_count
from workers.contracts.catalog.presets import preset

KINDS = ("dp_bytes", "tp_bytes", "pp_bytes", "cp_bytes", "ep_bytes")


def moved(model: str, plan: dict[str, Any], kind: str, **more: Any) -> float:
    return float(predicted(model, {"precision": "bf16", **plan}, **more)[kind].max())


@pytest.mark.parametrize(("zero", "times"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_data_parallel_moves_two_or_three_times_the_parameters(zero, times):
    """ZeRO, arXiv 1910.02054, section 7; in bf16, two bytes each."""
    psi = parameter_count(preset("llama3-8b")).total
    assert (
        moved("llama3-8b", {"dp": 8, "zero": zero}, "dp_bytes", using="deepspeed")
        == times * psi * 2
    )


def test_sharded_gradients_are_reduced_in_every_micro_batch():
    once = moved("llama3-8b", {"dp": 8, "zero": 3}, "dp_bytes")
    assert moved("llama3-8b", {"dp": 8, "zero": 3, "global_batch_size": 32}, "dp_bytes") == 4 * once
    whole = moved("llama3-8b", {"dp": 8}, "dp_bytes")
    assert moved("llama3-8b", {"dp": 8, "global_batch_size": 32}, "dp_bytes") == whole


@pytest.mark.parametrize(
    ("zero", "bytes_"), [(0, 2 * 4), (1, 4 + 2 * 4), (2, 2 + 4), (3, 2 * 2 + 4)]
)
def test_the_engine_sends_gradients_in_fp32(zero, bytes_):
    """Products are bf16, weights and gradients fp32, and `fully_shard` reduces in fp32;
    ZeRO 1 reduces all.
    This determines the time; the reported volume is that of the paper."""
    psi, plan = parameter_count(preset("llama3-8b")).total, {"dp": 8, "zero": zero}
    assert moved("llama3-8b", plan, "stage_dp_sent_bytes") == bytes_ * psi
    assert moved("llama3-8b", plan, "dp_bytes") == (2 + (zero == 3)) * 2 * psi
    assert (
        moved("llama3-8b", plan, "stage_dp_sent_bytes", using="deepspeed")
        == (2 + (zero == 3)) * 2 * psi
    )


def test_experts_are_reduced_among_their_own_copies_only():
    """With ep = dp each expert is on one device alone: only what is not an expert moves."""
    own, copies = ({"dp": 8, "ep": ep} for ep in (8, 4))
    count = parameter_count(preset("mixtral-8x7b"))
    experts = count.moe_layers * 8 * count.expert
    reduced = moved("mixtral-8x7b", own, "dp_bytes", using="deepspeed")
    assert reduced == 2 * 2 * (count.total - experts)
    more = moved("mixtral-8x7b", copies, "dp_bytes", using="deepspeed") - reduced
    assert more == 2 * 2 * experts / 4


def test_tensor_parallel_reduces_four_times_a_layer():
    """Megatron-LM, arXiv 1909.08053, section 3: two forward, two backward; full recomputation two
    more.
    """
    state, layers = 2048 * 4096 * 2, 32
    ends = 2 * 2 * state  # the table's output and the head's input gradient
    assert moved("llama3-8b", {"tp": 8}, "tp_bytes") == 2 * 4 * layers * state + ends
    assert (
        moved("llama3-8b", {"tp": 8, "recompute": "full"}, "tp_bytes")
        == 2 * 6 * layers * state + ends
    )


def test_pipeline_context_and_experts():
    state = 2048 * 4096 * 2
    plan: dict[str, Any] = {"pp": 4, "global_batch_size": 8}
    assert moved("llama3-8b", plan, "pp_bytes") == 2 * 8 * state
    folded = {**plan, "schedule": "interleaved_1f1b", "virtual_stages": 2}
    assert moved("llama3-8b", folded, "pp_bytes") == 2 * moved("llama3-8b", plan, "pp_bytes")
    # a ring passes keys and values of 8 heads of 128 in both passes, their gradients in one, cp - 1
    # times
    elements = 32 * 512 * 2 * 8 * 128
    assert moved("llama3-8b", {"cp": 4}, "cp_bytes", using="megatron") == 3 * elements * (2 + 2 + 2)
    assert moved("llama3-8b", {"cp": 4}, "cp_bytes", using="fsdp2") == 3 * elements * (2 + 2 + 4)
    # GShard: dispatch and combine, both ways, top_k 2
    assert moved("mixtral-8x7b", {"dp": 8, "ep": 8}, "ep_bytes") == 32 * 4 * 2 * state


def test_a_group_of_one_moves_nothing():
    table = predicted("mixtral-8x7b", {"recompute": "full", "global_batch_size": 4})
    assert [float(table[kind][0]) for kind in KINDS] == [0.0] * 5


def test_a_parameter_server_is_a_bottleneck_that_a_ring_is_not():
    """Each worker moves as much as in a ring; the server's own link dp times that."""
    table = predicted("llama3-8b", {"dp": 64, "precision": "bf16"}, using="deepspeed")
    assert table["parameter_server_bytes"][0] == table["dp_bytes"][0]
    assert table["parameter_server_link_bytes"][0] == 64 * table["dp_bytes"][0]


@pytest.mark.parametrize(
    ("ranks", "mebibytes", "microseconds"),
    [
        (2, 16, 129),
        (2, 256, 1454),
        (4, 16, 178),
        (4, 256, 1928),
        (8, 8, 130),
        (8, 64, 580),
        (8, 1024, 8196),
    ],
)
def test_all_reduces_on_a100(ranks, mebibytes, microseconds):
    """NCCL on NVLink, measured by arXiv 2312.12391's authors; untuned, over a factor of 250 in
    size.
    """
    model = preset("gpt3-175b").model_copy(
        update={"hidden": 2048, "heads": 16, "kv_heads": 16, "head_dim": 128}
    )
    tokens = mebibytes * 2**20 // (2048 * 2)
    table = predicted(model, {"tp": ranks, "precision": "bf16"}, device="a100-80g", seq_len=tokens)
    assert table["tp_reduce_s"][0] * 1e6 == pytest.approx(microseconds, rel=0.2)


def test_crossing_nodes_is_slower_and_shares_the_network():
    """Two ranks on two nodes have one link; sixteen on two nodes bring eight links for the same
    bytes.
    """

    def seconds(plan: dict[str, Any]) -> float:
        return float(predicted("llama3-8b", {"precision": "bf16", **plan})["stage_dp_s"].max())

    inside, across = seconds({"dp": 8}), seconds({"dp": 16})
    apart = seconds({"dp": 2, "tp": 8})
    assert inside < across < 2.5 * inside
    assert apart * 8 > 3 * across  # an eighth of the parameters over one link each

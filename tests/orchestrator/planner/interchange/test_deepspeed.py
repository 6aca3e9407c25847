"""The exported JSON against the configuration of DeepSpeed 0.19.6."""

from __future__ import annotations

import json
from typing import Any

import pytest

from orchestrator.planner.interchange import Inexpressible, export
from tests.orchestrator.planner.interchange.plans import legal_cases, write

# constants of runtime/constants.py and fields of the sections' own classes
_KEYS: dict[str, set[str]] = {
    "train_batch_size": set(),
    "train_micro_batch_size_per_gpu": set(),
    "gradient_accumulation_steps": set(),
    "communication_data_type": set(),
    "sequence_parallel_size": set(),
    "data_parallel_size": set(),
    "zero_optimization": {
        "stage",
        "overlap_comm",
        "offload_optimizer",
        "offload_param",
        "stage3_max_live_parameters",
        "stage3_prefetch_bucket_size",
        "stage3_gather_16bit_weights_on_model_save",
        "mics_shard_size",
    },
    "optimizer": {"type", "params"},
    "bf16": {"enabled"},
    "fp16": {"enabled", "loss_scale", "initial_scale_power", "loss_scale_window"},
    "data_types": {"grad_accum_dtype"},
    "tensor_parallel": {"autotp_size"},
    "expert_parallel": {"enabled", "autoep_size"},
    "pipeline": {"stages", "partition"},
    "activation_checkpointing": {"partition_activations", "number_checkpoints"},
    "aio": {"block_size", "queue_depth", "single_submit", "overlap_events"},
}
_OFFLOAD = {"device", "pin_memory", "nvme_path"}


def deepspeed(**plan: Any) -> dict[str, Any]:
    return json.loads(write("deepspeed", **plan).text)


def test_every_key_exists_and_the_batch_is_exact() -> None:
    for model, plan, cluster, seq_len in legal_cases(400, seed=13):
        try:
            read = json.loads(
                export("deepspeed", model=model, plan=plan, cluster=cluster, seq_len=seq_len).text
            )
        except Inexpressible:
            continue
        for key, value in read.items():
            if isinstance(value, dict):
                assert set(value) <= _KEYS[key], key
            else:
                assert _KEYS[key] == set(), key
        zero = read["zero_optimization"]
        for name in ("offload_optimizer", "offload_param"):
            assert set(zero.get(name, {})) <= _OFFLOAD
        micro, steps = read["train_micro_batch_size_per_gpu"], read["gradient_accumulation_steps"]
        assert read["train_batch_size"] == micro * steps * plan.dp == plan.global_batch_size


@pytest.mark.parametrize(
    ("zero", "offload", "optimizer", "param"),
    [
        (1, "none", None, None),
        (2, "optimizer", "cpu", None),
        (3, "optimizer", "cpu", None),
        (3, "all", "cpu", "cpu"),
        (3, "nvme", "nvme", "nvme"),
    ],
)
def test_stages_and_offload(
    zero: int, offload: str, optimizer: str | None, param: str | None
) -> None:
    section = deepspeed(dp=8, zero=zero, offload=offload)["zero_optimization"]

    assert section["stage"] == zero
    assert section.get("offload_optimizer", {}).get("device") == optimizer
    assert section.get("offload_param", {}).get("device") == param
    assert ("nvme_path" in section.get("offload_param", {})) == (offload == "nvme")


def test_gathered_weight_limits_are_in_elements() -> None:
    section = deepspeed(dp=8, zero=3, prefetch_layers=2, max_live_params=500_000_000)[
        "zero_optimization"
    ]

    # a block of Llama 3 8B has 218,112,000 parameters
    assert section["stage3_prefetch_bucket_size"] == 2 * 218_112_000
    assert section["stage3_max_live_parameters"] == 500_000_000


def test_precisions_and_loss_scale() -> None:
    scale = {"initial": 1024.0, "growth_interval": 500}

    assert deepspeed(dp=8, zero=1)["bf16"] == {"enabled": True}
    fp16 = deepspeed(dp=8, zero=1, precision="fp16", loss_scale=scale)["fp16"]
    assert fp16 == {
        "enabled": True,
        "loss_scale": 0,
        "initial_scale_power": 10,
        "loss_scale_window": 500,
    }
    assert not {"bf16", "fp16"} & set(deepspeed(dp=8, zero=1, precision="fp32"))
    odd = write(
        "deepspeed", dp=8, zero=1, precision="fp16", loss_scale={"initial": 1000.0, "growth": 4.0}
    )
    assert any("2^10 instead of 1000" in note for note in odd.notes)
    assert any("always doubles and halves" in note for note in odd.notes)


def test_axes() -> None:
    assert deepspeed(dp=4, tp=2, zero=2)["tensor_parallel"] == {"autotp_size": 2}
    ulysses = deepspeed(dp=2, cp=4, zero=3)
    assert (
        ulysses["sequence_parallel_size"],
        ulysses["data_parallel_size"],
        ulysses["train_batch_size"],
    ) == (4, 2, 2)
    assert (
        deepspeed(model="mixtral-8x7b", dp=8, ep=4, zero=2)["expert_parallel"]["autoep_size"] == 4
    )
    deep = write("deepspeed", dp=2, tp=2, pp=2, zero=1, global_batch_size=16)
    assert json.loads(deep.text)["pipeline"]["stages"] == 2
    assert "tensor_parallel" not in json.loads(deep.text)
    assert any("num_pp=2, num_mp=2, num_dp=2" in note for note in deep.notes)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"precision": "fp8"}, "no fp8"),
        ({"recompute": "selective"}, "recompute selective: written as full"),
        (
            {"dp": 4, "pp": 2, "zero": 1, "schedule": "zbv", "global_batch_size": 32},
            "is 1F1B, not zbv",
        ),
        (
            {"dp": 4, "pp": 2, "zero": 0, "schedule": "pipedream", "global_batch_size": 32},
            "Orrery's own engine",
        ),
        ({"dp": 4, "cp": 2}, "Ulysses"),
        ({"zero": 2, "dp_replicate": 2}, "dp_replicate 2 is omitted"),
        ({"zero": 3, "dp_replicate": 2}, "MiCS"),
        ({"dp": 4, "tp": 2, "sequence_parallel": True}, "more memory than planned"),
    ],
)
def test_deviations_are_noted(plan: dict[str, Any], words: str) -> None:
    assert any(words in note for note in write("deepspeed", **{"dp": 8, "zero": 2, **plan}).notes)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"dp": 4, "pp": 2, "zero": 2, "global_batch_size": 32}, "ZeRO 0 or 1 only"),
        ({"zero": 0, "offload": "optimizer"}, "under ZeRO only"),
        ({"zero": 2, "offload": "all"}, "ZeRO-3 only"),
        ({"zero": 2, "offload": "nvme"}, "ZeRO-3 only"),
        ({"dp": 2, "cp": 2, "tp": 2}, "with tp or pp"),
        ({"model": "mixtral-8x7b", "dp": 4, "tp": 2, "ep": 2}, "AutoTP with expert"),
        ({"model": "mixtral-8x7b", "dp": 2, "cp": 4, "ep": 8}, "does not divide dp 2"),
    ],
)
def test_unsupported_plans_are_refused(plan: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        write("deepspeed", **{"dp": 8, "zero": 3, **plan})

"""The exported YAML, read by accelerate's own loader, launcher and mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands import launch
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.parallelism_config import ParallelismConfig

from orchestrator.planner.interchange import Exported, Inexpressible, export
from tests.orchestrator.planner.interchange.plans import legal_cases, write
from workers.contracts import ClusterSpec, ParallelPlan
from workers.contracts.catalog.presets import PRESETS


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The file as `accelerate launch` loads it: configuration and resolved arguments."""
    monkeypatch.setattr(launch, "is_deepspeed_available", lambda: True)

    def loaded(result: Exported) -> tuple[ClusterConfig, Any]:
        path = tmp_path / result.filename
        path.write_text(result.text, encoding="utf-8")
        config = load_config_from_file(str(path))  # refuses unknown keys
        given = launch.launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
        resolved, _, _ = launch._validate_launch_command(given)
        known = vars(resolved)
        for section in (config.fsdp_config, config.parallelism_config):
            assert set(section) <= set(known), section
        return config, resolved

    return loaded


def test_accelerate_loads_every_file(load: Any) -> None:
    taken = 0
    for model, plan, cluster, seq_len in legal_cases(300, seed=17):
        try:
            result = export("accelerate", model=model, plan=plan, cluster=cluster, seq_len=seq_len)
        except Inexpressible:
            continue
        config, resolved = load(result)
        taken += 1
        assert config.num_processes == plan.world_size == resolved.num_processes
        assert config.num_machines == cluster.nodes
        if config.parallelism_config:
            sizes = {
                key.removeprefix("parallelism_config_"): value
                for key, value in config.parallelism_config.items()
                if key.endswith("_size")
            }
            assert ParallelismConfig(**sizes).total_size == plan.world_size
    assert taken > 30


def test_sharding_with_tensor_and_context_parallelism(load: Any) -> None:
    config, resolved = load(
        write(
            "accelerate",
            dp=4,
            tp=2,
            cp=2,
            zero=3,
            dp_replicate=2,
            recompute="full",
            global_batch_size=16,
        )
    )

    assert config.distributed_type.value == "FSDP"
    assert (resolved.fsdp_version, resolved.fsdp_reshard_after_forward) == (2, True)
    assert resolved.fsdp_activation_checkpointing is True
    assert config.parallelism_config == {
        "parallelism_config_dp_replicate_size": 2,
        "parallelism_config_dp_shard_size": 2,
        "parallelism_config_tp_size": 2,
        "parallelism_config_cp_size": 2,
        "parallelism_config_cp_comm_strategy": "alltoall",
    }
    assert resolved.use_parallelism_config is True
    assert resolved.mixed_precision == "bf16"


@pytest.mark.parametrize(
    ("plan", "kind", "section"),
    [
        ({"dp": 1}, "NO", {}),
        ({"dp": 8}, "MULTI_GPU", {}),
        ({"dp": 8, "zero": 1}, "DEEPSPEED", {"zero_stage": 1, "offload_optimizer_device": "none"}),
        (
            {"dp": 8, "zero": 2, "offload": "optimizer"},
            "DEEPSPEED",
            {"zero_stage": 2, "offload_optimizer_device": "cpu"},
        ),
        (
            {"dp": 8, "zero": 3, "offload": "nvme"},
            "DEEPSPEED",
            {"zero_stage": 3, "offload_param_device": "nvme"},
        ),
        ({"dp": 8, "zero": 2}, "FSDP", {"fsdp_reshard_after_forward": False, "fsdp_version": 2}),
        ({"dp": 8, "zero": 3}, "FSDP", {"fsdp_reshard_after_forward": True, "fsdp_version": 2}),
        ({"dp": 8, "zero": 3, "offload": "all"}, "FSDP", {"fsdp_offload_params": True}),
    ],
)
def test_sharding_selects_the_engine(
    plan: dict[str, Any], kind: str, section: dict[str, Any], load: Any
) -> None:
    config, _ = load(write("accelerate", **plan))

    assert config.distributed_type.value == kind
    result = config.fsdp_config or config.deepspeed_config
    assert {key: result[key] for key in section} == section


def test_notes_give_accumulation_and_batch() -> None:
    sharded = write("accelerate", dp=8, zero=3, micro_batch_size=2, global_batch_size=64)
    stage1 = yaml.safe_load(
        write("accelerate", dp=8, zero=1, micro_batch_size=2, global_batch_size=64).text
    )

    assert any("gradient_accumulation_steps=4" in note for note in sharded.notes)
    assert any("batches of 2 sequences of 4096" in note for note in sharded.notes)
    assert stage1["deepspeed_config"]["gradient_accumulation_steps"] == 4


def test_two_machines_get_notes(load: Any) -> None:
    result = write("accelerate", dp=16, zero=3)

    config, _ = load(result)
    assert (config.num_machines, config.num_processes, config.rdzv_backend) == (2, 16, "c10d")
    assert any("machine_rank" in note for note in result.notes)


def test_on_cpus_only_data_parallelism_is_exported(load: Any) -> None:
    cluster = ClusterSpec(device="cpu", devices_per_node=2)

    def on_cpus(zero: int) -> Exported:
        plan = ParallelPlan(dp=2, zero=zero)
        return export(
            "accelerate", model=PRESETS["llama-tiny"], plan=plan, cluster=cluster, seq_len=128
        )

    config, _ = load(on_cpus(0))
    assert (config.distributed_type.value, config.use_cpu) == ("MULTI_CPU", True)
    assert any("ACCELERATE_USE_CPU=true" in note for note in on_cpus(0).notes)
    for zero in (1, 3):
        with pytest.raises(ValueError, match="shards on accelerators only"):
            on_cpus(zero)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (
            {"dp": 4, "pp": 2, "global_batch_size": 16},
            "not support pipeline parallelism.*torchtitan, megatron",
        ),
        (
            {"model": "mixtral-8x7b", "ep": 2},
            "not support expert parallelism.*torchtitan or megatron",
        ),
        ({"dp": 1, "tp": 8}, "combines tp with sharding only; the plan has tp 8"),
        ({"dp": 4, "tp": 2, "zero": 0}, "combines tp with sharding only; the plan has tp 2"),
        ({"dp": 4, "cp": 2, "zero": 0}, "with replicated weights"),
        ({"dp": 4, "tp": 2, "offload": "optimizer"}, "deepspeed"),
        ({"zero": 0, "offload": "optimizer"}, "under ZeRO only"),
        ({"zero": 2, "offload": "all"}, "ZeRO-3 only"),
    ],
)
def test_unsupported_plans_are_refused(plan: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        write("accelerate", **{"dp": 8, "zero": 3, **plan})

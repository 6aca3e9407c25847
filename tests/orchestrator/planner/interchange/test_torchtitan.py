"""The exported TOML against the options of torchtitan v0.2.2."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from orchestrator.planner.interchange import Inexpressible, export
from tests.orchestrator.planner.interchange.plans import legal_cases, write

# what of JobConfig a plan decides, section by section
_OPTIONS = {
    "job": {"description"},
    "model": {"name", "flavor", "converters"},
    "optimizer": {"name", "lr"},
    "training": {
        "local_batch_size",
        "global_batch_size",
        "seq_len",
        "steps",
        "dtype",
        "mixed_precision_param",
        "mixed_precision_reduce",
        "enable_cpu_offload",
    },
    "parallelism": {
        "data_parallel_replicate_degree",
        "data_parallel_shard_degree",
        "fsdp_reshard_after_forward",
        "tensor_parallel_degree",
        "pipeline_parallel_degree",
        "module_fqns_per_model_part",
        "pipeline_parallel_schedule",
        "pipeline_parallel_microbatch_size",
        "context_parallel_degree",
        "expert_parallel_degree",
        "expert_tensor_parallel_degree",
        "pipeline_parallel_expert_parallel_overlap",
    },
    "activation_checkpoint": {"mode", "selective_ac_option", "memory_budget"},
    "compile": {"enable", "components"},
    "quantize": {"linear"},
}
_MODES = {"selective", "full", "memory_budget", "none"}
# names of torch.distributed.pipelining.schedules
_SCHEDULES = {
    "GPipe",
    "1F1B",
    "Interleaved1F1B",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
}


def titan(*model: str, **plan: Any) -> dict[str, Any]:
    return tomllib.loads(write("torchtitan", *model, **plan).text)


def test_every_key_exists() -> None:
    for model, plan, cluster, seq_len in legal_cases(300, seed=5):
        try:
            result = export("torchtitan", model=model, plan=plan, cluster=cluster, seq_len=seq_len)
        except Inexpressible:
            continue
        read = tomllib.loads(result.text)
        for section, values in read.items():
            assert set(values) <= _OPTIONS[section], section
        assert read["activation_checkpoint"]["mode"] in _MODES
        assert read["training"]["mixed_precision_param"] in {"bfloat16", "float32"}
        if plan.pp > 1:
            mesh = read["parallelism"]
            parts = mesh["module_fqns_per_model_part"]
            assert mesh["pipeline_parallel_schedule"] in _SCHEDULES
            assert len(parts) == plan.stages
            names = [
                "tok_embeddings",
                *(f"layers.{i}" for i in range(model.layers)),
                "norm",
                "output",
            ]
            assert [name for part in parts for name in part] == names


def test_a_plan_of_all_axes() -> None:
    read = titan(
        "llama3-405b",
        dp=8,
        tp=8,
        pp=4,
        cp=2,
        zero=3,
        dp_replicate=2,
        sequence_parallel=True,
        schedule="interleaved_1f1b",
        virtual_stages=2,
        micro_batch_size=2,
        global_batch_size=128,
        recompute="full",
        seq_len=8192,
    )

    assert read["model"] == {"name": "llama3", "flavor": "405B"}
    mesh = read["parallelism"]
    parts = mesh.pop("module_fqns_per_model_part")
    assert [sum(name.startswith("layers.") for name in part) for part in parts] == [
        16,
        16,
        16,
        16,
        16,
        16,
        15,
        15,
    ]
    assert mesh == {
        "data_parallel_replicate_degree": 2,
        "data_parallel_shard_degree": 4,
        "tensor_parallel_degree": 8,
        "pipeline_parallel_degree": 4,
        "context_parallel_degree": 2,
        "expert_parallel_degree": 1,
        "fsdp_reshard_after_forward": "always",
        "pipeline_parallel_schedule": "Interleaved1F1B",
        "pipeline_parallel_microbatch_size": 2,
    }
    # eight micro-batches of two go through the pipeline
    assert read["training"]["local_batch_size"] == 16
    assert read["activation_checkpoint"] == {"mode": "full"}


def test_experts_have_the_tensor_parallelism_of_other_layers() -> None:
    read = titan("deepseek-v3", dp=8, tp=4, ep=8, zero=2, sequence_parallel=True)

    assert read["model"] == {"name": "deepseek_v3", "flavor": "671B"}
    mesh = read["parallelism"]
    assert (mesh["expert_parallel_degree"], mesh["expert_tensor_parallel_degree"]) == (8, 4)
    assert mesh["fsdp_reshard_after_forward"] == "never"


def test_incompatible_options_are_not_combined() -> None:
    deep = {"dp": 8, "pp": 2, "ep": 8, "zero": 2, "schedule": "dualpipev", "global_batch_size": 64}
    plain, again = titan("deepseek-v3", **deep), titan("deepseek-v3", **deep, recompute="full")
    split = write("torchtitan", "deepseek-v3", dp=4, cp=2, zero=3)

    # DualPipeV's overlap refuses recompute, the shipped flavor's FlexAttention refuses context
    # parallelism
    assert "pipeline_parallel_expert_parallel_overlap" not in plain["parallelism"]
    assert again["parallelism"]["pipeline_parallel_expert_parallel_overlap"] is False
    assert tomllib.loads(split.text)["model"]["flavor"] == "deepseek-v3"
    assert any("register 'deepseek-v3'" in note for note in split.notes)


def test_an_unknown_shape_comes_with_its_registration() -> None:
    notes = write("torchtitan", "llama2-13b", dp=8, zero=3).notes

    # torchtitan widens 4 x 5120 by 2/3 and rounds up to multiple_of: 13,824
    assert any(
        "TransformerModelArgs(dim=5120, n_layers=40, n_heads=40, n_kv_heads=40, vocab_size=32000, "
        "multiple_of=13824, "
        "norm_eps=1e-05, rope_theta=10000, rope_scaling_args=RoPEScalingArgs(scaling_factor=1.0))"
        in note
        for note in notes
    )


@pytest.mark.parametrize(
    ("model", "name", "flavor"),
    [
        ("llama3-8b", "llama3", "8B"),
        ("llama3-70b", "llama3", "70B"),
        ("qwen3-0.6b", "qwen3", "0.6B"),
        ("qwen3-32b", "qwen3", "32B"),
        ("qwen3-30b-a3b", "qwen3", "30B-A3B"),
        ("deepseek-v2", "deepseek_v3", "236B"),
        ("llama2-7b", "llama3", "llama2-7b"),
        ("smollm2-135m", "qwen3", "smollm2-135m"),  # tied: of the two only qwen3's model can
        ("mixtral-8x7b", "qwen3", "mixtral-8x7b"),
    ],
)
def test_models_match_a_flavor_or_get_a_registration(model: str, name: str, flavor: str) -> None:
    result = write("torchtitan", model, dp=8, zero=3, seq_len=512)

    assert tomllib.loads(result.text)["model"] == {"name": name, "flavor": flavor}
    assert any("register" in note for note in result.notes) == (flavor == model)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"zero": 1}, "no ZeRO-1"),
        ({"tp": 2, "dp": 4, "zero": 3}, "always shards the sequence"),
        (
            {"dp": 4, "cp": 2, "pp": 2, "schedule": "pipedream", "global_batch_size": 16},
            "Orrery's own engine",
        ),
        (
            {"dp": 4, "pp": 2, "zero": 2, "schedule": "naive", "global_batch_size": 16},
            "no schedule naive",
        ),
        ({"recompute": "auto", "zero": 3}, "memory_budget"),
        ({"recompute": "selective", "zero": 3}, "per-operation"),
        ({"offload": "optimizer", "zero": 3}, "offloads parameters and gradients"),
        ({"zero": 0, "cp": 2, "dp": 4}, "over the cp ranks"),
        ({"precision": "fp8", "zero": 3}, "torchao's rowwise"),
        ({"precision": "fp8", "zero": 3, "fp8_recipe": "tensorwise"}, "torchao's tensorwise"),
        ({"zero": 3}, "Rotary scaling of torchtitan's llama3 is llama3, of the model none"),
        ({"zero": 3, "prefetch_layers": 2}, "prefetch_layers"),
    ],
)
def test_deviations_are_noted(plan: dict[str, Any], words: str) -> None:
    assert any(words in note for note in write("torchtitan", **{"dp": 8, **plan}).notes)


@pytest.mark.parametrize(
    ("model", "plan", "words"),
    [
        ("gpt2-124m", {}, "RMSNorm and SwiGLU"),
        ("llama3-8b", {"precision": "fp16"}, "deepspeed or megatron for fp16"),
        ("llama3-8b", {"offload": "nvme"}, "offload to NVMe. Use deepspeed"),
        ("llama3-8b", {"zero": 0, "offload": "all"}, "sharded states only"),
        ("llama3-8b", {"zero": 0, "dp": 1, "tp": 8}, "would train in fp32"),
        ("llama3-8b", {"zero": 0, "dp": 4, "tp": 2, "precision": "fp32"}, "replicates weights"),
        ("deepseek-v3", {"zero": 0, "ep": 8, "precision": "fp32"}, "ep 8 does not divide"),
        (
            "qwen3-8b",
            {"dp": 4, "pp": 2, "global_batch_size": 16},
            "no pipeline for its model qwen3",
        ),
    ],
)
def test_unsupported_plans_are_refused(model: str, plan: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        write("torchtitan", model, **{"dp": 8, "zero": 3, "seq_len": 1024, **plan})

"""The exported arguments against Megatron-LM core 0.20.0."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from orchestrator.planner.interchange import Inexpressible, export
from tests.orchestrator.planner.interchange.plans import legal_cases, write
from tests.orchestrator.planner.interchange.shapes import CONFIGS
from workers.contracts.catalog.presets import PRESETS
from workers.contracts.huggingface import read_model

# accepted arguments and how many values each takes
_FLAGS = {
    0: {
        "--add-qkv-bias",
        "--bf16",
        "--disable-bias-linear",
        "--fp16",
        "--grad-reduce-in-bf16",
        "--group-query-attention",
        "--moe-grouped-gemm",
        "--moe-router-enable-expert-bias",
        "--moe-router-pre-softmax",
        "--multi-latent-attention",
        "--no-bias-gelu-fusion",
        "--optimizer-cpu-offload",
        "--overlap-grad-reduce",
        "--overlap-param-gather",
        "--qk-layernorm",
        "--rotary-interleaved",
        "--sequence-parallel",
        "--swiglu",
        "--untie-embeddings-and-output-weights",
        "--use-distributed-optimizer",
        "--use-megatron-fsdp",
        "--use-precision-aware-optimizer",
        "--use-rope-scaling",
    },
    1: {
        "--attention-dropout",
        "--ckpt-format",
        "--context-parallel-size",
        "--data-parallel-sharding-strategy",
        "--expert-model-parallel-size",
        "--expert-tensor-parallel-size",
        "--ffn-hidden-size",
        "--fp8-format",
        "--fp8-recipe",
        "--global-batch-size",
        "--hidden-dropout",
        "--hidden-size",
        "--initial-loss-scale",
        "--kv-channels",
        "--kv-lora-rank",
        "--loss-scale-window",
        "--lr",
        "--make-vocab-size-divisible-by",
        "--max-position-embeddings",
        "--micro-batch-size",
        "--moe-aux-loss-coeff",
        "--moe-expert-capacity-factor",
        "--moe-ffn-hidden-size",
        "--moe-layer-freq",
        "--moe-router-bias-update-rate",
        "--moe-router-group-topk",
        "--moe-router-load-balancing-type",
        "--moe-router-num-groups",
        "--moe-router-score-function",
        "--moe-router-topk",
        "--moe-router-topk-scaling-factor",
        "--moe-shared-expert-intermediate-size",
        "--moe-token-dispatcher-type",
        "--mscale",
        "--mscale-all-dim",
        "--norm-epsilon",
        "--normalization",
        "--num-attention-heads",
        "--num-distributed-optimizer-instances",
        "--num-experts",
        "--num-layers",
        "--num-layers-per-virtual-pipeline-stage",
        "--num-query-groups",
        "--optimizer",
        "--pipeline-model-parallel-layout",
        "--pipeline-model-parallel-size",
        "--position-embedding-type",
        "--q-lora-rank",
        "--qk-head-dim",
        "--qk-pos-emb-head-dim",
        "--recompute-granularity",
        "--recompute-method",
        "--recompute-num-layers",
        "--rope-scaling-factor",
        "--rope-type",
        "--rotary-base",
        "--rotary-scaling-factor",
        "--rotary-seq-len-interpolation-factor",
        "--seq-length",
        "--tensor-model-parallel-size",
        "--train-iters",
        "--v-head-dim",
        "--vocab-size",
        "--window-size",
        "--yarn-beta-fast",
        "--yarn-beta-slow",
        "--yarn-original-max-position-embeddings",
    },
}


def parsed(text: str) -> dict[str, str]:
    """Arguments and their value, `""` for flags; each line is one argument."""
    result: dict[str, str] = {}
    for line in text.splitlines():
        words = shlex.split(line, comments=True)
        if words:
            name, *values = words
            assert name not in result, name
            assert name in _FLAGS[len(values)], line
            result[name] = "".join(values)
    return result


def megatron(model: str = "llama3-8b", **plan: Any) -> dict[str, str]:
    return parsed(write("megatron", model, **plan).text)


def test_every_argument_exists_with_its_number_of_values() -> None:
    for model, plan, cluster, seq_len in legal_cases(300, seed=11):
        try:
            parsed(
                export("megatron", model=model, plan=plan, cluster=cluster, seq_len=seq_len).text
            )
        except Inexpressible:
            continue


def test_llama3_405b_on_all_dense_axes() -> None:
    result = megatron(
        "llama3-405b",
        dp=8,
        tp=8,
        pp=16,
        cp=1,
        zero=1,
        sequence_parallel=True,
        schedule="1f1b",
        global_batch_size=128,
        recompute="full",
        seq_len=8192,
    )

    expected = {
        "--num-layers": "126",
        "--hidden-size": "16384",
        "--ffn-hidden-size": "53248",
        "--num-attention-heads": "128",
        "--group-query-attention": "",
        "--num-query-groups": "8",
        "--swiglu": "",
        "--normalization": "RMSNorm",
        "--rotary-base": "500000",
        "--position-embedding-type": "rope",
        "--disable-bias-linear": "",
        "--untie-embeddings-and-output-weights": "",
        "--tensor-model-parallel-size": "8",
        "--vocab-size": "128256",
        "--pipeline-model-parallel-size": "16",
        "--sequence-parallel": "",
        "--use-distributed-optimizer": "",
        "--recompute-granularity": "full",
        "--recompute-method": "uniform",
        "--recompute-num-layers": "1",
        "--bf16": "",
        "--micro-batch-size": "1",
        "--global-batch-size": "128",
        "--seq-length": "8192",
        # 126 layers do not divide by 16: the layout names them
        "--pipeline-model-parallel-layout": "Et*8|" + "t*8|" * 13 + "t*7|t*7L",
    }
    assert {name: result.get(name) for name in expected} == expected
    assert "--qk-layernorm" not in result


def test_deepseek_v3_with_latent_attention_and_experts() -> None:
    result = megatron(
        "deepseek-v3", dp=64, pp=4, ep=64, zero=1, global_batch_size=1024, recompute="selective"
    )

    expected = {
        "--multi-latent-attention": "",
        "--q-lora-rank": "1536",
        "--kv-lora-rank": "512",
        "--qk-head-dim": "128",
        "--qk-pos-emb-head-dim": "64",
        "--v-head-dim": "128",
        "--qk-layernorm": "",
        "--rope-type": "yarn",
        "--rotary-scaling-factor": "40",
        "--num-experts": "256",
        "--moe-router-topk": "8",
        "--moe-ffn-hidden-size": "2048",
        "--moe-shared-expert-intermediate-size": "2048",
        "--moe-layer-freq": "([0]*3+[1]*58)",
        "--moe-router-score-function": "sigmoid",
        "--moe-router-num-groups": "8",
        "--moe-router-group-topk": "4",
        "--moe-router-topk-scaling-factor": "2.5",
        "--moe-router-enable-expert-bias": "",
        "--expert-model-parallel-size": "64",
        "--expert-tensor-parallel-size": "1",
        "--recompute-granularity": "selective",
    }
    assert {name: result.get(name) for name in expected} == expected
    assert not {"--group-query-attention", "--recompute-method", "--moe-router-pre-softmax"} & set(
        result
    )


def test_other_blocks() -> None:
    gpt = megatron("gpt2-124m", seq_len=1024)
    assert gpt["--position-embedding-type"] == "learned_absolute"
    assert gpt["--normalization"] == "LayerNorm"
    assert not {"--swiglu", "--disable-bias-linear", "--untie-embeddings-and-output-weights"} & set(
        gpt
    )

    deepseek_v2 = megatron("deepseek-v2", seq_len=512)
    assert "--moe-router-pre-softmax" in deepseek_v2  # its chosen scores do not add up to one
    assert deepseek_v2["--moe-shared-expert-intermediate-size"] == "3072"

    qwen = parsed(write("megatron", read_model(CONFIGS["qwen2.5-7b"])).text)
    assert {"--add-qkv-bias", "--disable-bias-linear"} <= set(qwen)

    mistral = parsed(write("megatron", read_model(CONFIGS["mistral-7b"])).text)
    assert mistral["--window-size"] == "4095,0"

    llama31 = parsed(write("megatron", read_model(CONFIGS["llama3-405b"])).text)
    assert llama31["--rope-scaling-factor"] == "8"


@pytest.mark.parametrize(
    ("zero", "wanted"),
    [
        (0, {}),
        (1, {"--use-distributed-optimizer": ""}),
        (2, {"--use-megatron-fsdp": "", "--data-parallel-sharding-strategy": "optim_grads"}),
        (3, {"--use-megatron-fsdp": "", "--data-parallel-sharding-strategy": "optim_grads_params"}),
    ],
)
def test_zero_stages(zero: int, wanted: dict[str, str]) -> None:
    names = {
        "--use-distributed-optimizer",
        "--use-megatron-fsdp",
        "--data-parallel-sharding-strategy",
    }
    result = megatron(dp=8, zero=zero, dp_replicate=2)

    both = {"--use-distributed-optimizer": ""} if zero else {}
    assert {name: result[name] for name in names & set(result)} == {**both, **wanted}
    assert result.get("--num-distributed-optimizer-instances") == ("2" if zero else None)


@pytest.mark.parametrize(
    ("schedule", "virtual", "wanted", "words"),
    [
        ("1f1b", 1, None, ""),
        ("interleaved_1f1b", 4, "2", ""),
        ("zb1p", 2, "4", "no zb1p: written as interleaved"),
        ("zbv", 2, None, "no zbv: written as 1F1B"),
        ("dualpipev", 2, None, "torchtitan runs dualpipev"),
        ("gpipe", 1, None, "no gpipe"),
        ("naive", 1, None, "no naive"),
        ("pipedream", 1, None, "Orrery's own engine runs pipedream"),
    ],
)
def test_schedules(schedule: str, virtual: int, wanted: str | None, words: str) -> None:
    result = write(
        "megatron", dp=2, pp=4, schedule=schedule, virtual_stages=virtual, global_batch_size=32
    )

    assert parsed(result.text).get("--num-layers-per-virtual-pipeline-stage") == wanted
    assert "--pipeline-model-parallel-layout" not in result.text
    assert (
        any(words in note for note in result.notes)
        if words
        else not any("written as" in n for n in result.notes)
    )


def test_a_v_shaped_pipeline_preserves_the_layers_of_each_device() -> None:
    layers = [6, 3, 4, 4, 4, 4, 4, 3]

    result = megatron(pp=4, dp=2, schedule="zbv", stage_layers=layers, global_batch_size=16)

    # the first device has the first and the last stage, 6 + 3
    assert result["--pipeline-model-parallel-layout"] == "Et*9|t*7|t*8|t*8L"


@pytest.mark.parametrize(
    ("model", "plan", "words"),
    [
        ("llama3-8b", {"offload": "all", "zero": 3}, "deepspeed"),
        ("llama3-8b", {"offload": "optimizer"}, "zero 1"),
        ("mixtral-8x7b", {"dp": 4, "tp": 2, "zero": 1}, "sequence_parallel true"),
        (
            "llama3-8b",
            {"dp": 2, "pp": 4, "schedule": "interleaved_1f1b", "global_batch_size": 4},
            "rounds of pp 4",
        ),
        ("llama3-8b", {"dp": 1, "cp": 8, "seq_len": 1000}, "2 cp chunks"),
    ],
)
def test_unsupported_plans_are_refused(model: str, plan: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        write("megatron", model, **{"dp": 8, **plan})


@pytest.mark.parametrize(
    "change", [{"activation": "relu"}, {"gated_mlp": True}, {"logit_softcap": 30.0}]
)
def test_blocks_without_arguments_are_refused(change: dict[str, Any]) -> None:
    gpt = PRESETS["gpt2-124m"]
    assert write("megatron", gpt, seq_len=512)

    with pytest.raises(ValueError, match="deepspeed or accelerate"):
        write("megatron", gpt.from_dict({**gpt.to_dict(), **change}), seq_len=512)

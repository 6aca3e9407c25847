"""The block types that predictions are measured on: sizes, how each is computed, and the switches
that say so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from orchestrator.planner.model import activations  # noqa: F401  registers the terms
from orchestrator.planner.model.frameworks import framework
from orchestrator.planner.model.inputs import Request, table_of
from tests.orchestrator.planner.model.activations import measure
from tests.orchestrator.planner.model.activations.blocks import Attention, Block, Mlp, Style, rotary
from tests.orchestrator.planner.model.activations.experts import Experts
from tests.orchestrator.planner.model.activations.latent import Mfa, Mla
from tests.orchestrator.planner.model.activations.ranks import RankBlock
from workers.contracts.catalog.presets import preset
from workers.contracts.specs.cluster import ClusterSpec
from workers.contracts.specs.model import ModelSpec
from workers.contracts.specs.plan import ParallelPlan
from workers.models.decoder import Block as EngineBlock

PLAIN = Style()
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """One block type.

    `engine` takes the training engine's own block; `routes` the layer with experts.
    """

    name: str
    model: ModelSpec
    style: Style = PLAIN
    switches: dict[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    precision: str = "bf16"
    seq_len: int = 1024
    batch: int = 2
    engine: bool = False
    routes: bool = False
    tp: int = 1
    sequence_parallel: bool = False

    def build(self) -> nn.Module:
        if self.engine:
            return EngineBlock(self.model)
        if self.tp > 1:
            regathers = bool(self.switches.get("regathers_inputs", True))
            return RankBlock(
                self.model,
                self.style,
                self.tp,
                sequence=self.sequence_parallel,
                regathers=regathers,
            )
        kinds: dict[str, Callable[[ModelSpec, Style], nn.Module]] = {
            "softmax": Attention,
            "mla": Mla,
            "mfa": Mfa,
        }
        attention = kinds[self.model.attention](self.model, self.style)
        mlp = (
            Experts(self.model, self.style)
            if self.routes
            else Mlp(self.model, self.style, self.model.ffn)
        )
        return Block(self.model, self.style, attention, mlp)

    @property
    def recomputes(self) -> tuple[str, ...]:
        """The engine's selective recomputation is that of all but products; a rank's products are
        not yet reduced.
        """
        if self.tp > 1:
            return ("none", "core", "full")
        return ("none", "products", "full") if self.engine else ("none", "core", "products", "full")

    def predicted(self, recompute: str) -> float:
        """The planner's bytes for one layer; `recompute`: none, core, products or full."""
        selective = (
            recompute
            if recompute in ("core", "products")
            else self.switches.get("selective", "core")
        )
        plan = ParallelPlan.model_validate(
            {
                "precision": self.precision,
                "micro_batch_size": self.batch,
                "tp": self.tp,
                "sequence_parallel": self.sequence_parallel,
                "recompute": "selective" if recompute in ("core", "products") else recompute,
            }
        )
        using = framework({"name": "orrery", **self.switches, "selective": selective})
        cluster = ClusterSpec(device=self.device, nodes=1, devices_per_node=self.tp)
        table = table_of([Request(self.model, plan, cluster, self.seq_len, using)], {})
        return float(
            table["layer_activation_moe_bytes" if self.routes else "layer_activation_dense_bytes"][
                0
            ]
        )

    def hooked(self, recompute: str) -> int:
        return self._measure(measure.saved_bytes, recompute)

    def tracked(self, recompute: str) -> int:
        return self._measure(measure.tracked_bytes, recompute)

    def _measure(self, count: Callable[..., int], recompute: str) -> int:
        def build() -> nn.Module:
            block = self.build()
            if recompute == "core":
                measure.recompute_core(block)
            return block.train()

        parts = self.tp if self.sequence_parallel else 1
        shape = (self.batch, self.seq_len // parts, self.model.hidden)
        rope = rotary(self.model, self.seq_len)
        return count(build, (rope,), shape, DTYPES[self.precision], recompute=recompute)


def _with(name: str, **changes: Any) -> ModelSpec:
    """A preset with changes, nested ones merged."""
    return ModelSpec.from_dict(_merged(preset(name).model_dump(), changes))


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    both = {
        key: _merged(base[key], changes[key])
        for key in changes
        if isinstance(changes[key], dict) and base[key]
    }
    return {**base, **changes, **both}


# each expert is a module of its own here, which 256 of them would make slow to measure
_EIGHT = {"experts": 8, "groups": None, "groups_per_token": None}
_GPU = {"device": "h100-80g"}
_MFA = ModelSpec.from_dict(
    {
        "name": "mfa",
        "layers": 24,
        "hidden": 2048,
        "heads": 16,
        "ffn": 5632,
        "vocab": 65536,
        "max_seq_len": 4096,
        "attention": "mfa",
        "mfa": {"qk_rank": 1024, "head_dim": 256, "heads": 28},
    }
)

CASES = (
    Case("engine: Llama, bf16 on a CPU", preset("llama3-8b"), engine=True),
    Case("engine: Llama, fp32 on a CPU", preset("smollm2-135m"), engine=True, precision="fp32"),
    Case("engine: GPT-2, bf16", preset("gpt2-124m"), engine=True),
    Case("engine: GPT-2 with dropout, bf16", _with("gpt2-124m", dropout=0.1), engine=True),
    Case("engine: Qwen3 with QK norms", preset("qwen3-0.6b"), engine=True),
    Case("engine: window of 256", _with("qwen3-0.6b", window=256), engine=True),
    Case(
        "GPT-2, eager attention, dropout, bf16 (CPU)",
        _with("gpt2-124m", dropout=0.1),
        Style(core="eager"),
        {"flash_attention": False, "fused_softmax": False},
    ),
    Case(
        "GPT-2, eager attention, fp32 (CPU)",
        preset("gpt2-124m"),
        Style(core="eager"),
        {"flash_attention": False, "fused_softmax": False},
        precision="fp32",
    ),
    Case(
        "GPT-3, 16-bit softmax, dropout (Korthikanti's block)",
        _with("gpt3-175b", dropout=0.1),
        Style(core="fused_softmax", byte_masks=True),
        {"flash_attention": False},
        **_GPU,
        batch=1,
    ),
    Case(
        "GPT-2, flash attention, dropout (GPU)",
        _with("gpt2-xl-1.5b", dropout=0.1),
        Style(core="flash", byte_masks=True),
        **_GPU,
    ),
    Case(
        "Llama 3, flash, one-kernel norm and SwiGLU (GPU)",
        preset("llama3-8b"),
        Style("kernel", "flash", "kernel", repeat_kv=True),
        {"fused_swiglu": True, "repeats_kv": True},
        **_GPU,
    ),
    Case(
        "Llama 2, flash, norm in steps, SwiGLU in steps",
        preset("llama2-7b"),
        Style("torch", "flash"),
        {"fused_norm": False, "fused_swiglu": False},
        **_GPU,
    ),
    Case(
        "Llama 3, Hugging Face eager",
        preset("llama3-8b"),
        Style("hugging_face", "eager", repeat_kv=True),
        {
            "fused_norm": False,
            "flash_attention": False,
            "fused_softmax": False,
            "repeats_kv": True,
            "norm_weight_in_fp32": False,
        },
    ),
    Case(
        "MQA, biasless GELU",
        ModelSpec.from_dict(
            {
                "name": "mqa",
                "layers": 12,
                "hidden": 2048,
                "heads": 16,
                "kv_heads": 1,
                "ffn": 8192,
                "vocab": 32000,
                "max_seq_len": 2048,
                "gated_mlp": False,
                "activation": "gelu",
                "norm": "layernorm",
            }
        ),
    ),
    Case("MHA, relu, learned positions", _with("gpt2-124m", activation="relu"), precision="fp32"),
    Case(
        "gated relu, one-kernel norm",
        _with("smollm2-135m", activation="relu"),
        Style("kernel"),
        {"fused_norm": True},
    ),
    Case("MLA, DeepSeek-V2, in steps (CPU), bf16", preset("deepseek-v2"), batch=1),
    Case(
        "MLA, DeepSeek-V3, efficient kernel (GPU)",
        preset("deepseek-v3"),
        Style("kernel", "efficient", "kernel"),
        {"fused_swiglu": True},
        **_GPU,
        seq_len=4096,
        batch=1,
    ),
    Case(
        "MLA without query rank, fp32 (CPU)",
        _with(
            "deepseek-v2", mla={"q_lora_rank": None}, hidden=2048, heads=16, kv_heads=16, ffn=10944
        ),
        precision="fp32",
    ),
    Case("MFA, one key and value head", _MFA),
    Case(
        "MoE, Mixtral",
        preset("mixtral-8x7b"),
        Style("kernel", "flash", "kernel", repeat_kv=True),
        {"fused_swiglu": True, "repeats_kv": True},
        **_GPU,
        routes=True,
    ),
    Case(
        "MoE, Qwen3-30B-A3B, 8 experts, fp32 (CPU)",
        _with("qwen3-30b-a3b", moe=_EIGHT),
        precision="fp32",
        routes=True,
    ),
    Case(
        "MoE, DeepSeek-V3, shared expert, 8 experts",
        _with("deepseek-v3", moe=_EIGHT),
        Style("kernel", "efficient", "kernel"),
        {"fused_swiglu": True},
        **_GPU,
        batch=1,
        routes=True,
    ),
    Case(
        "a rank of 8: GPT-3, dropout",
        _with("gpt3-175b", dropout=0.1),
        Style(core="fused_softmax", byte_masks=True),
        {"flash_attention": False},
        **_GPU,
        batch=1,
        tp=8,
    ),
    Case(
        "a rank of 8: GPT-3, dropout, sequence parallel",
        _with("gpt3-175b", dropout=0.1),
        Style(core="fused_softmax", byte_masks=True),
        {"flash_attention": False},
        **_GPU,
        batch=1,
        tp=8,
        sequence_parallel=True,
    ),
    Case(
        "a rank of 16: Llama 3 70B, 8 key and value heads",
        preset("llama3-70b"),
        Style("kernel", "flash", "kernel", repeat_kv=True),
        {"fused_swiglu": True, "repeats_kv": True},
        **_GPU,
        tp=16,
        sequence_parallel=True,
    ),
    Case(
        "a rank of 4: Llama 3, gathered inputs kept",
        preset("llama3-8b"),
        Style("kernel", "flash", "kernel", repeat_kv=True),
        {"fused_swiglu": True, "repeats_kv": True, "regathers_inputs": False},
        **_GPU,
        tp=4,
        sequence_parallel=True,
    ),
)

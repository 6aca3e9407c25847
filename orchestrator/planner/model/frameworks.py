"""Differences between training frameworks: fused kernels, dtypes of states, padding.

A framework is a set of switches; the formulas are the same for all. Does not depend on speed.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from workers.contracts.base import Refused
from workers.contracts.specs.model import ModelSpec
from workers.contracts.specs.plan import ParallelPlan

_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0}


@dataclass(frozen=True)
class Framework:
    """Switches of one framework; a request may set each of them under `framework`.

    `params_dtype`: stored weights (None: the compute dtype). If it is wider than the compute dtype,
    gathered or cast copies compute.
    `grad_dtype`: gradients (None: the dtype of stored weights).
    `master_weights`: fp32 copies in addition to 16-bit weights.
    `wide_moments`: moments of 16-bit weights are fp32 also without such copies.
    `fully_shard`: ZeRO 2 and 3 store shards and gather full copies to compute; shards are "rows" of
    each tensor (FSDP2) or ranges of all parameters ("flat", FSDP1).
    `greedy_optimizer`: ZeRO 1 assigns full tensors to ranks (torch's ZeroRedundancyOptimizer).
    `bucket_elements`: size of a separate reduction and gathering bucket (DeepSpeed).
    `fused_wgrad`: weight gradients accumulate inside the matrix product, which leaves a dummy
    gradient per shape.
    `offload_grads`: gradients are offloaded with optimizer states.
    `fused_norm_on_cpu`, `mask_bytes_on_cpu` (0: the compute dtype), `fused_swiglu_on_cpu` (None: as
    `fused_swiglu`): what torch does on a CPU; a request's fused_norm, mask_bytes and fused_swiglu
    override them.
    `norm_weight_in_fp32`: a decomposed RMSNorm applies its weight before the cast (torch) or after
    (Hugging Face).
    `repeats_kv`: keys and values are copied per query head.
    `whole_kv`: if tp exceeds the key-value heads, every rank stores the weights of all heads
    (Megatron: of its own).
    `windows_as_masks`: a window is a mask tensor.
    `regathers_inputs`: sequence parallel inputs of products are saved as shards and gathered again.
    `selective`: recomputes the attention "core"; all but the outputs of "products"; all but the
    attention kernel's output and those of every second product ("alternate_products", torchtitan's
    per-op option); or every second layer in full ("alternate_layers", torchtitan's option 2).
    `compile`: layers are compiled, so that element-wise kernels are fused.
    `async_tp`: products overlap with their tensor parallel traffic in pieces.
    `fp8_gather`: with fp8, sharded weights are gathered in fp8.
    `pipeline_keeps_weights`: in a pipeline, ZeRO 3 gathers once per step, keeps the stage's full
    weights, and adds full fp32 gradients that it reduces once (torchtitan).
    `cross_entropy_in_place`: the softmax overwrites fp32 logits, and their gradient the softmax;
    `in_place_whole_only`: not if tp shards the vocabulary.
    `loss_piece_bytes` (0: none), `loss_piece_bytes_on_cpu`: rows of fp32 logits that such a loss
    copies at a time.
    `loss_chunks`: chunks of a micro-batch whose logits exist one after the other.
    `without_logits`: on a GPU without pp, loss and gradients are computed from hidden states with
    the logits of `loss_chunk_bytes` of tokens in memory.
    `fused_activations`: activations that the fused gate supports.
    `ring_grad_dtype`: dtype of the key and value gradients sent in a context parallel ring (None:
    compute).
    `syncs_once`: without pp, hybrid sharding all-reduces and ZeRO 2 gathers weights once per step.
    `scatter_gather`: each tensor parallel rank sends its shard of a hidden state to the next stage
    (arXiv 2104.04473, 4.1).
    `vocab_multiple`: the vocabulary is padded to a multiple of this times tp.
    `attention_flops`: the convention for MFU.
    """

    name: str
    flash_attention: bool = True
    fused_norm: bool = True
    fused_swiglu: bool = True
    fused_cross_entropy: bool = False
    fused_softmax: bool = True
    params_dtype: str | None = None
    grad_dtype: str | None = None
    ring_grad_dtype: str | None = None
    master_weights: bool = True
    wide_moments: bool = False
    optimizer: str = "adamw"
    fully_shard: str | None = None
    greedy_optimizer: bool = False
    bucket_elements: float = 0.0
    fused_wgrad: bool = False
    offload_grads: bool = False
    flat_step: bool = False
    keeps_outputs: bool = True
    fused_norm_on_cpu: bool = False
    mask_bytes_on_cpu: float = 0.0
    norm_weight_in_fp32: bool = True
    repeats_kv: bool = False
    whole_kv: bool = False
    windows_as_masks: bool = False
    regathers_inputs: bool = True
    selective: str = "core"
    compile: bool = False
    async_tp: bool = False
    fp8_gather: bool = False
    pipeline_keeps_weights: bool = False
    cross_entropy_in_place: bool = False
    in_place_whole_only: bool = False
    loss_piece_bytes: float = 0.0
    loss_piece_bytes_on_cpu: float = 0.0
    loss_chunks: int = 1
    without_logits: bool = False
    loss_chunk_bytes: float = 0.0
    fused_swiglu_on_cpu: bool | None = None
    fused_activations: tuple[str, ...] = ("silu", "gelu", "gelu_tanh", "relu")
    vocab_multiple: int = 1
    mask_bytes: float = 1.0
    overlap_grad_reduce: bool = True
    scatter_gather: bool = False
    syncs_once: bool = False
    attention_flops: str = "full"

    def columns(self, plan: ParallelPlan, model: ModelSpec) -> dict[str, float]:
        """The switches as columns for one plan: 0 or 1, dtypes as bytes per element."""
        compute = _BYTES["bf16" if plan.precision == "fp8" else plan.precision]
        stored_dtype = plan.params_dtype or self.params_dtype
        stored = _BYTES[stored_dtype] if stored_dtype else compute
        grad_dtype = plan.grad_dtype or self.grad_dtype
        mixed = stored < 4
        one_gate = self.fused_swiglu and model.activation in self.fused_activations
        on_cpu = one_gate if self.fused_swiglu_on_cpu is None else self.fused_swiglu_on_cpu
        return {
            "flash": float(self.flash_attention),
            "fused_norm": float(self.fused_norm),
            "fused_swiglu": float(one_gate),
            "fused_swiglu_on_cpu": float(on_cpu),
            "fused_cross_entropy": float(self.fused_cross_entropy),
            "fused_softmax": float(self.fused_softmax),
            "compute_bytes": compute,
            "param_bytes": stored,
            "grad_bytes": _BYTES[grad_dtype] if grad_dtype else stored,
            "ring_grad_bytes": _BYTES[self.ring_grad_dtype] if self.ring_grad_dtype else compute,
            "master_bytes": 4.0 if mixed and self.master_weights else 0.0,
            "moment_bytes": _moment_bytes(
                self.optimizer,
                stored if mixed and not (self.master_weights or self.wide_moments) else 4.0,
            ),
            "reduce_bytes": _BYTES[plan.reduce_dtype] if plan.reduce_dtype else compute,
            # fully_shard reduces in fp32 by default
            "sharded_reduce_bytes": _BYTES[plan.reduce_dtype] if plan.reduce_dtype else 4.0,
            "fully_sharded": float(self.fully_shard is not None),
            "row_sharded": float(self.fully_shard == "rows"),
            "greedy_optimizer": float(self.greedy_optimizer),
            "bucket_elements": self.bucket_elements,
            "fused_wgrad": float(self.fused_wgrad),
            "offload_grads": float(self.offload_grads),
            "factored": float(self.optimizer == "adafactor"),
            "muon": float(self.optimizer == "muon"),
            "flat_step": float(self.flat_step),
            "keeps_outputs": float(self.keeps_outputs),
            "fused_norm_on_cpu": float(self.fused_norm_on_cpu),
            "mask_bytes_on_cpu": self.mask_bytes_on_cpu or compute,
            "norm_weight_in_fp32": float(self.norm_weight_in_fp32),
            "windows_as_masks": float(self.windows_as_masks),
            "repeats_kv": float(self.repeats_kv),
            "whole_kv": float(self.whole_kv),
            "regathers_inputs": float(self.regathers_inputs),
            "selective_products": float(self.selective in ("products", "alternate_products")),
            "alternate_products": float(self.selective == "alternate_products"),
            "alternate_layers": float(self.selective == "alternate_layers"),
            "compiled": float(self.compile),
            "async_tp": float(self.async_tp),
            "gathered_weight_bytes": 1.0
            if self.fp8_gather and plan.precision == "fp8"
            else compute,
            "pipeline_keeps_weights": float(self.pipeline_keeps_weights),
            "loss_chunks": float(self.loss_chunks),
            "cross_entropy_in_place": float(self.cross_entropy_in_place),
            "in_place_whole_only": float(self.in_place_whole_only),
            "loss_piece_bytes": self.loss_piece_bytes,
            "loss_piece_bytes_on_cpu": self.loss_piece_bytes_on_cpu,
            "without_logits": float(self.without_logits),
            "loss_chunk_bytes": self.loss_chunk_bytes,
            "vocab_multiple": float(self.vocab_multiple),
            "mask_bytes": self.mask_bytes,
            "overlap_grad_reduce": float(self.overlap_grad_reduce),
            "scatter_gather": float(self.scatter_gather),
            "syncs_once": float(self.syncs_once),
            "causal_flops": float(self.attention_flops == "causal"),
        }


# optimizer state per parameter without master weights: number of moments, bytes of each if fixed
_MOMENTS: dict[str, tuple[float, float | None]] = {
    "adamw": (2, None),
    "adam": (2, None),
    "adam8bit": (2, 1.0),
    "adamw8bit": (2, 1.0),
    "adafactor": (0, None),  # rows and columns only
    "muon": (1, None),
    "lion": (1, None),
    "sgd": (0, None),
}


def _moment_bytes(optimizer: str, default: float) -> float:
    number, fixed = _MOMENTS[optimizer]
    return number * (fixed or default)


FRAMEWORKS = {
    each.name: each
    for each in (
        Framework(
            "orrery",
            params_dtype="fp32",
            master_weights=False,
            wide_moments=True,
            ring_grad_dtype="fp32",
            fully_shard="rows",
            greedy_optimizer=True,
            fused_swiglu_on_cpu=False,
            fused_activations=("silu",),
            whole_kv=True,
            selective="products",
            cross_entropy_in_place=True,
            in_place_whole_only=True,
            loss_piece_bytes=2.0**28,
            loss_piece_bytes_on_cpu=2.0**21,
            without_logits=True,
            loss_chunk_bytes=2.0**29,
            syncs_once=True,
        ),
        Framework(
            "fsdp2",
            params_dtype="fp32",
            ring_grad_dtype="fp32",
            fully_shard="rows",
            fused_swiglu=False,
            regathers_inputs=False,
            selective="alternate_products",
            fp8_gather=True,
            pipeline_keeps_weights=True,
        ),
        Framework(
            "megatron",
            grad_dtype="fp32",
            vocab_multiple=128,
            fused_wgrad=True,
            keeps_outputs=False,
            scatter_gather=True,
            cross_entropy_in_place=True,
        ),
        Framework(
            "megatron-deepspeed",
            vocab_multiple=128,
            flash_attention=False,
            bucket_elements=5e8,
            flat_step=True,
            overlap_grad_reduce=False,
            cross_entropy_in_place=True,
            scatter_gather=True,
        ),
        Framework("llm-foundry", params_dtype="fp32", fully_shard="flat", fused_cross_entropy=True),
        Framework(
            "deepspeed",
            bucket_elements=5e8,
            offload_grads=True,
            flat_step=True,
            scatter_gather=True,
        ),
    )
}


def framework(request: Mapping[str, Any] | str | None) -> Framework:
    """The named framework with the requested switches; unknown keys are ignored.

    Raises Refused for an unknown name.
    """
    switches: dict[str, Any] = (
        {"name": request} if isinstance(request, str) else dict(request or {})
    )
    name = str(switches.pop("name", "orrery"))
    if name not in FRAMEWORKS:
        near = difflib.get_close_matches(name, FRAMEWORKS, n=2, cutoff=0.3) or sorted(FRAMEWORKS)
        raise Refused(
            f"{name!r} is not a known framework",
            f"Use {' or '.join(near)}.",
            field="framework.name",
        )
    for switch in ("fused_norm", "fused_swiglu", "mask_bytes"):
        if switch in switches:
            switches.setdefault(f"{switch}_on_cpu", switches[switch])
    known = {each.name for each in fields(Framework)} - {"name"}
    return replace(
        FRAMEWORKS[name], **{key: value for key, value in switches.items() if key in known}
    )

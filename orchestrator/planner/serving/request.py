"""A serving request: model, devices, lengths, quantization; its problems and input columns.

Does not compute a prediction.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from orchestrator.planner.model.columns.model_columns import model_columns
from workers.contracts.base import Contract, Problem, problem
from workers.contracts.catalog.devices import Device
from workers.contracts.catalog.presets import preset
from workers.contracts.catalog.units import GIB
from workers.contracts.specs.cluster import ClusterSpec
from workers.contracts.specs.model import ModelSpec, Positive
from workers.contracts.specs.plan_rules.rule import nearest_divisor

# bytes per weight; int4 in groups of 128 with a 16-bit scale and a 4-bit zero (AWQ, arXiv
# 2306.00978)
WEIGHT_BYTES = {"none": 2.0, "fp32": 4.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5 + 2.5 / 128}
KV_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0}

# GPU: large matrix products reach 0.6 of the datasheet in prefill, streams 0.8 of HBM (13B on
# A100-40G: 22 ms measured over a minimum of 16.7), CUDA graphs need about 4 µs per layer
GPU_PROFILE = {
    "gemm_efficiency": 0.6,
    "bandwidth_efficiency": 0.8,
    "launch_s_per_layer": 4e-6,
    "collective_latency_s": 9e-6,
    "memory_utilization": 0.9,
    "reserved_bytes": 1.5 * GIB,
}
CPU_PROFILE = {
    "gemm_efficiency": 0.7,
    "bandwidth_efficiency": 0.7,
    "launch_s_per_layer": 2e-4,
    "collective_latency_s": 5e-5,
    "memory_utilization": 0.9,
    "reserved_bytes": 0.3 * GIB,
}


def _named(value: object) -> object:
    return preset(value) if isinstance(value, str) else value


class ServingRequest(Contract):
    """A serving request.

    Lengths are in tokens; `batch` is the number of sequences in flight over all `replicas`
    (default: as many as fit, at most 256). `quantize` applies to the weights, `kv_dtype` to the
    cache. `acceptance` is the chance that a draft token is accepted, `draft_cost` the time of one
    draft step over that of the model, `draft_tokens` how many are drafted per step (default: the
    best number). `device` replaces the device of the cluster, if it is not in the catalogue.
    """

    model: Annotated[ModelSpec, BeforeValidator(_named, json_schema_input_type=str | ModelSpec)]
    cluster: ClusterSpec
    device: Device | None = None
    prompt_len: Positive = 1024
    output_len: Positive = 256
    batch: Positive | None = None
    tp: Positive = 1
    pp: Positive = 1
    replicas: Positive = 1
    quantize: Literal["none", "fp32", "fp8", "int8", "int4"] = "none"
    kv_dtype: Literal["fp32", "bf16", "fp16", "fp8", "int8"] = "bf16"
    block_size: Positive = 16
    acceptance: Annotated[float, Field(ge=0, le=1)] | None = None
    draft_tokens: Positive | None = None
    draft_cost: Annotated[float, Field(gt=0, le=1)] = 0.05
    memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None

    @property
    def entry(self) -> Device:
        """The device's catalogue entry."""
        return self.device or self.cluster.entry

    @property
    def devices(self) -> int:
        """Devices of all replicas."""
        return self.tp * self.pp * self.replicas

    def problems(self) -> list[Problem]:
        """Problems of the request; empty if it is valid."""
        problems, model = [], self.model
        if self.devices > self.cluster.devices:
            message = (
                f"tp {self.tp} x pp {self.pp} x replicas {self.replicas} is {self.devices} devices"
            )
            problems.append(
                problem(
                    "tp",
                    f"{message}, the cluster has {self.cluster.devices}",
                    "Use fewer replicas or more nodes.",
                )
            )
        heads = model.mfa.heads if model.mfa else model.heads
        if heads % self.tp:
            near = nearest_divisor(heads, self.tp)
            problems.append(
                problem("tp", f"{heads} heads do not divide by tp {self.tp}", f"Use tp {near}.")
            )
        elif model.attention == "softmax" and model.kv_heads % self.tp and self.tp % model.kv_heads:
            near = nearest_divisor(model.kv_heads, self.tp)
            message = f"{model.kv_heads} key-value heads neither divide by tp {self.tp} nor into it"
            problems.append(problem("tp", message, f"Use tp {near}."))
        if self.pp > model.layers:
            message = f"{model.layers} layers are too few for pp {self.pp}"
            problems.append(problem("pp", message, f"Use pp {model.layers}."))
        if self.prompt_len + self.output_len > model.max_seq_len:
            message = (
                f"{self.prompt_len} + {self.output_len} tokens exceed max_seq_len "
                f"{model.max_seq_len} of {model.name}"
            )
            problems.append(
                problem(
                    "prompt_len", message, f"Use {max(1, model.max_seq_len - self.output_len)}."
                )
            )
        return problems

    @property
    def precision(self) -> str:
        """The precision of products; int8 and int4 weights are widened to 16 bit first."""
        return {"fp8": "fp8", "fp32": "fp32"}.get(self.quantize, self.entry.half)

    def notes(self) -> list[str]:
        """Notes on the prediction."""
        used = self.entry.compute_precision(self.precision)
        if used == self.precision:
            return []
        message = (
            f"{self.entry.name} does not multiply in {self.precision}: weights are stored in it and"
        )
        return [
            f"{message} products are counted at its {used} peak, {self.entry.peak(used):g} TFLOP/s."
        ]

    def columns(self) -> dict[str, Any]:
        """Input columns of SERVING except `batch`."""
        entry, cluster = self.entry, self.cluster
        profile = CPU_PROFILE if entry.kind == "cpu" else GPU_PROFILE
        sizes = model_columns(self.model)
        inside = self.tp <= self.cluster.devices_per_node
        hop_inside = self.tp * self.pp <= self.cluster.devices_per_node
        links = (
            (cluster.inter_node_gb_per_s or entry.inter_node_gb_per_s) * 1e9,
            (cluster.intra_node_gb_per_s or entry.intra_node_gb_per_s) * 1e9,
        )
        usd = (
            entry.usd_per_hour
            if cluster.usd_per_device_hour is None
            else cluster.usd_per_device_hour
        )
        return {
            **sizes,
            **profile,
            "params_expert": sizes["params_expert_split"] + sizes["params_expert_whole"],
            "params_table": sizes["params_embedding"]
            + sizes["params_head"]
            + sizes["params_positions"],
            "tp": self.tp,
            "pp": self.pp,
            "replicas": self.replicas,
            "prompt_len": self.prompt_len,
            "output_len": self.output_len,
            "block_size": self.block_size,
            "weight_bytes_each": WEIGHT_BYTES[self.quantize],
            "kv_bytes_each": KV_BYTES[self.kv_dtype],
            "activation_bytes_each": 4.0 if self.quantize == "fp32" else 2.0,
            "capacity_bytes": entry.memory_bytes,
            "peak_flops": entry.peak(self.precision) * 1e12,
            "memory_bandwidth": entry.memory_gb_per_s * 1e9,
            "tp_bandwidth": links[inside],
            "pp_bandwidth": links[hop_inside],
            "usd_per_hour": usd,
            "memory_utilization": self.memory_utilization or profile["memory_utilization"],
            "acceptance": 0.0 if self.acceptance is None else self.acceptance,
            "draft_cost": self.draft_cost,
            "draft_tokens": 0.0,
        }

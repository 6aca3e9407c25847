"""The registry of serving terms, its input columns, and the sources that several terms cite.

A separate registry from training.
"""

from __future__ import annotations

from orchestrator.planner.model.terms import Registry

SERVING = Registry()
POPE = "Pope et al. 2022, arXiv 2211.05102"
VLLM = "Kwon et al. 2023, arXiv 2309.06180"
LEVIATHAN = "Leviathan et al. 2023, arXiv 2211.17192"

SERVING.declare_inputs(
    "",
    "model",
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "head_dim",
    "vocab",
    "window",
    "attention_width",
    "is_mla",
    "kv_lora",
    "qk_rope",
    "experts",
    "top_k",
    "moe_layers",
    "dense_layers",
    "is_mfa",
)
SERVING.declare_inputs(
    "parameters",
    "model",
    "params_total",
    "params_active",
    "params_embedding",
    "params_head",
    "params_expert",
    "params_table",
)
SERVING.declare_inputs(
    "", "request", "tp", "pp", "replicas", "batch", "prompt_len", "output_len", "block_size"
)
SERVING.declare_inputs(
    "B", "request: quantization", "weight_bytes_each", "kv_bytes_each", "activation_bytes_each"
)
SERVING.declare_inputs("B", "device catalogue", "capacity_bytes")
SERVING.declare_inputs("FLOP/s", "device catalogue", "peak_flops")
SERVING.declare_inputs(
    "B/s", "device catalogue or cluster", "memory_bandwidth", "tp_bandwidth", "pp_bandwidth"
)
SERVING.declare_inputs("USD/h", "cluster", "usd_per_hour")
SERVING.declare_inputs(
    "", "default profile", "gemm_efficiency", "bandwidth_efficiency", "memory_utilization"
)
SERVING.declare_inputs("s", "default profile", "launch_s_per_layer", "collective_latency_s")
SERVING.declare_inputs("B", "default profile", "reserved_bytes")
SERVING.declare_inputs(
    "", "request: speculative decoding", "acceptance", "draft_tokens", "draft_cost"
)

"""Exports a ModelSpec as Megatron-LM model arguments.

Options as in Megatron-LM core 0.20.0. Refuses shapes that these arguments cannot express.
"""

from __future__ import annotations

from orchestrator.planner.interchange.export_job import ExportJob, refuse
from workers.contracts import ModelSpec

Args = list[tuple[str, ...]]

# Megatron pads the vocabulary to a multiple of this times tp
_PAD = 128


def model_args(job: ExportJob) -> Args:
    """The arguments. Raises Inexpressible for shapes that Megatron's GPT does not support."""
    model = job.model
    return [
        *_block(job),
        *(_mla(job) if model.mla else _heads(model)),
        *_position(job),
        *(_moe(job) if model.moe else []),
        ("--vocab-size", str(model.vocab)),
        *_vocabulary(job),
    ]


def _block(job: ExportJob) -> Args:
    model = job.model
    if model.attention == "mfa":
        raise _refuse(model, "multi-matrix factorization attention")
    if model.logit_softcap is not None:
        raise _refuse(model, "a logit softcap")
    args: Args = [
        ("--num-layers", str(model.layers)),
        ("--hidden-size", str(model.hidden)),
        ("--ffn-hidden-size", str(model.ffn)),
        ("--num-attention-heads", str(model.heads)),
        ("--normalization", "RMSNorm" if model.norm == "rmsnorm" else "LayerNorm"),
        ("--norm-epsilon", f"{model.norm_eps:.15g}"),
        ("--attention-dropout", f"{model.dropout:g}"),
        ("--hidden-dropout", f"{model.dropout:g}"),
    ]
    if model.norm == "layernorm" and model.bias != "all":
        job.note(
            "Megatron's LayerNorm always has a bias: 2 x hidden parameters per layer more than the "
            "model"
        )
    if not model.tie_embeddings:
        args.append(("--untie-embeddings-and-output-weights",))
    if model.bias != "all":
        args.append(("--disable-bias-linear",))
    if model.bias == "qkv":
        args.append(("--add-qkv-bias",))
    return args + _activation(job)


def _activation(job: ExportJob) -> Args:
    model = job.model
    if model.gated_mlp and model.activation == "silu":
        return [("--swiglu",)]
    if model.gated_mlp or model.activation not in ("gelu", "gelu_tanh"):
        raise _refuse(
            model, f"{'a gated' if model.gated_mlp else 'an'} MLP with {model.activation}"
        )
    # with bias fusion Megatron computes the tanh approximation, else the exact function
    if model.activation == "gelu":
        return [("--no-bias-gelu-fusion",)]
    if model.bias != "all":
        job.note("Without a bias Megatron computes the exact GELU, not the tanh approximation")
    return []


def _heads(model: ModelSpec) -> Args:
    args: Args = [("--kv-channels", str(model.head_dim))]
    if model.kv_heads != model.heads:
        args += [("--group-query-attention",), ("--num-query-groups", str(model.kv_heads))]
    if model.qk_norm:
        args.append(("--qk-layernorm",))
    if model.window is not None:
        # keys to the left of a query, excluding itself
        args.append(("--window-size", f"{model.window - 1},0"))
    return args


def _mla(job: ExportJob) -> Args:
    mla = job.model.mla
    assert mla is not None
    args: Args = [
        ("--multi-latent-attention",),
        ("--kv-lora-rank", str(mla.kv_lora_rank)),
        ("--qk-head-dim", str(mla.qk_nope_head_dim)),
        ("--qk-pos-emb-head-dim", str(mla.qk_rope_head_dim)),
        ("--v-head-dim", str(mla.v_head_dim)),
        # the norms on the two latents
        ("--qk-layernorm",),
    ]
    return [*args, ("--q-lora-rank", str(mla.q_lora_rank))] if mla.q_lora_rank else args


def _position(job: ExportJob) -> Args:
    model = job.model
    args: Args = [("--max-position-embeddings", str(max(model.max_seq_len, job.seq_len)))]
    if model.position != "rope":
        kind = "learned_absolute" if model.position == "learned" else "none"
        return [*args, ("--position-embedding-type", kind)]
    base = round(model.rope.theta)
    if base != model.rope.theta:
        job.note(
            f"Megatron requires an integer rotary base: {base} instead of {model.rope.theta!r}"
        )
    args.append(("--rotary-base", str(base)))
    if model.rope.interleaved and not model.mla:
        args.append(("--rotary-interleaved",))
    return args + _scaling(job)


def _scaling(job: ExportJob) -> Args:
    model, scaling = job.model, job.model.rope.scaling
    name = scaling.name if scaling else ""
    if model.mla:
        args: Args = [
            ("--position-embedding-type", "rope"),
            ("--rope-type", "yarn" if name == "yarn" else "rope"),
        ]
        if scaling and name == "yarn":
            args += [
                ("--rotary-scaling-factor", f"{scaling.factor:g}"),
                ("--mscale", f"{1.0 if scaling.mscale is None else scaling.mscale:g}"),
                ("--mscale-all-dim", f"{scaling.mscale_all_dim or 0.0:g}"),
            ]
        elif scaling:
            job.note(f"Megatron's latent attention has no {name} rotary scaling, omitted")
        return args
    if scaling and name == "yarn":
        return [
            ("--position-embedding-type", "yarn"),
            ("--rotary-scaling-factor", f"{scaling.factor:g}"),
            (
                "--yarn-original-max-position-embeddings",
                str(scaling.original_max_seq_len or model.max_seq_len),
            ),
            ("--yarn-beta-fast", f"{scaling.beta_fast:g}"),
            ("--yarn-beta-slow", f"{scaling.beta_slow:g}"),
        ]
    args = [("--position-embedding-type", "rope")]
    if scaling and name == "llama3":
        args += [("--use-rope-scaling",), ("--rope-scaling-factor", f"{scaling.factor:g}")]
        values = (scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_seq_len)
        if values != (1.0, 4.0, 8192):
            job.note(
                "Megatron's llama3 scaling has fixed low, high and original length 1, 4, 8192, "
                f"not {values}"
            )
    elif scaling and name == "linear" and scaling.factor == int(scaling.factor):
        args.append(("--rotary-seq-len-interpolation-factor", str(int(scaling.factor))))
    elif scaling:
        job.note(
            f"Megatron has no rotary scaling {name} by {scaling.factor:g}, omitted: train within "
            "the original length"
        )
    return args


def _moe(job: ExportJob) -> Args:
    model = job.model
    moe = model.moe
    assert moe is not None
    args: Args = [
        ("--num-experts", str(moe.experts)),
        ("--moe-router-topk", str(moe.top_k)),
        ("--moe-ffn-hidden-size", str(moe.expert_ffn)),
        ("--moe-layer-freq", _layer_freq(model)),
        ("--moe-router-score-function", moe.scoring),
        ("--moe-grouped-gemm",),
        ("--moe-token-dispatcher-type", "alltoall"),
    ]
    if moe.shared_experts:
        args.append(("--moe-shared-expert-intermediate-size", str(moe.shared_width)))
    if moe.scoring == "softmax" and (not moe.renormalise or moe.top_k == 1):
        # softmax over all experts; otherwise the scores of the selected experts sum to one
        args.append(("--moe-router-pre-softmax",))
    elif moe.scoring == "sigmoid" and not moe.renormalise and moe.top_k > 1:
        job.note("Megatron normalizes sigmoid scores of the selected experts, the model does not")
    if moe.routed_scale != 1.0:
        args.append(("--moe-router-topk-scaling-factor", f"{moe.routed_scale:g}"))
    if moe.groups:
        chosen = moe.groups_per_token or moe.groups
        args += [
            ("--moe-router-num-groups", str(moe.groups)),
            ("--moe-router-group-topk", str(chosen)),
        ]
    args.append(("--moe-router-load-balancing-type", "aux_loss" if moe.aux_loss else "none"))
    if moe.aux_loss:
        args.append(("--moe-aux-loss-coeff", f"{moe.aux_loss:g}"))
    if moe.bias_update:
        args += [
            ("--moe-router-enable-expert-bias",),
            ("--moe-router-bias-update-rate", f"{moe.bias_update:g}"),
        ]
    if moe.capacity is not None:
        args.append(("--moe-expert-capacity-factor", f"{moe.capacity:g}"))
    return args


def _layer_freq(model: ModelSpec) -> str:
    """The interval of expert layers, or the pattern of all layers."""
    moe = model.moe
    assert moe is not None
    if moe.first_dense_layers == 0:
        return str(moe.every)
    if moe.every == 1:
        return f"([0]*{moe.first_dense_layers}+[1]*{model.layers - moe.first_dense_layers})"
    return "[" + ",".join(str(int(model.is_moe_layer(i))) for i in range(model.layers)) + "]"


def _vocabulary(job: ExportJob) -> Args:
    vocab, unit = job.model.vocab, _PAD * job.plan.tp
    padded = -(-vocab // unit) * unit
    if padded != vocab:
        job.note(f"Megatron pads the vocabulary of {vocab} to {padded}, a multiple of {_PAD} x tp")
    return [("--make-vocab-size-divisible-by", str(_PAD))]


def _refuse(model: ModelSpec, what: str) -> ValueError:
    return refuse(
        "Megatron",
        f"has no arguments for {what} of {model.name}",
        "Use deepspeed or accelerate.",
    )

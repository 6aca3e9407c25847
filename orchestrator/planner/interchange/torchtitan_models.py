"""Maps a ModelSpec to a torchtitan model and flavor, or to the code that registers a new flavor.

Flavors as in torchtitan v0.2.2 (`torchtitan/models/{llama3,qwen3,deepseek_v3}/__init__.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.planner.interchange.export_job import ExportJob, refuse
from workers.contracts import ModelSpec
from workers.contracts.specs.model import Rope

# layers, hidden, heads, kv_heads, ffn, vocabulary
_LLAMA3 = {
    (32, 4096, 32, 8, 14336, 128256): "8B",
    (80, 8192, 64, 8, 28672, 128256): "70B",
    (126, 16384, 128, 8, 53248, 128256): "405B",
}
# layers, hidden, heads, kv_heads, ffn, experts; head_dim 128, vocabulary 151936
_QWEN3 = {
    (28, 1024, 16, 8, 3072, 0): "0.6B",
    (28, 2048, 16, 8, 6144, 0): "1.7B",
    (36, 2560, 32, 8, 9728, 0): "4B",
    (36, 4096, 32, 8, 12288, 0): "8B",
    (40, 5120, 40, 8, 17408, 0): "14B",
    (64, 5120, 64, 8, 25600, 0): "32B",
    (48, 2048, 32, 4, 6144, 128): "30B-A3B",
    (94, 4096, 64, 4, 12288, 128): "235B-A22B",
}
_QWEN3_EXPERT_FFN = {"30B-A3B": 768, "235B-A22B": 1536}
# rotary scaling that each model applies, and its flavors' rotary base and norm epsilon
_SCALINGS = {"llama3": "llama3", "qwen3": "none", "deepseek_v3": "yarn"}
_CONSTANTS = {"llama3": (5e5, 1e-5), "qwen3": (1e6, 1e-6), "deepseek_v3": (1e4, 1e-5)}
_QWEN3_TIED = {"0.6B", "1.7B", "4B"}
# layers, hidden, heads, ffn, experts, expert_ffn, q_lora_rank, vocabulary
_DEEPSEEK = {
    (27, 2048, 16, 10944, 64, 1408, 0, 102400): "16B",
    (60, 5120, 128, 12288, 160, 1536, 1536, 102400): "236B",
    (61, 7168, 128, 18432, 256, 2048, 1536, 129280): "671B",
}


@dataclass(frozen=True, slots=True)
class TitanModel:
    """A torchtitan model; `registration` is the Python expression of a flavor it does not ship."""

    name: str
    flavor: str
    pipelines: bool
    registration: str = ""


def titan_model(job: ExportJob) -> TitanModel:
    """The matching model. Raises Inexpressible for a shape that no torchtitan model has."""
    titan = _nearest(job.model, cp=job.plan.cp)
    _note_constants(job, titan)
    return titan


def _nearest(model: ModelSpec, *, cp: int) -> TitanModel:
    _check_block(model)
    if model.attention == "mla":
        return _deepseek(model, cp=cp)
    plain = model.moe is None and not model.qk_norm and not model.tie_embeddings
    if plain and model.head_dim * model.heads == model.hidden:
        return _llama3(model)
    if model.moe and (
        model.moe.shared_experts
        or model.moe.groups
        or model.moe.first_dense_layers
        or model.moe.every > 1
    ):
        raise refuse(
            "torchtitan",
            "supports experts in qwen3 only in every layer, without shared experts or groups",
            _elsewhere(),
        )
    return _qwen3(model)


def _check_block(model: ModelSpec) -> None:
    for wrong, message in (
        (model.attention == "mfa", "has no multi-matrix factorization attention"),
        (
            model.norm != "rmsnorm" or not model.gated_mlp or model.activation != "silu",
            "has only RMSNorm and SwiGLU blocks",
        ),
        (model.position != "rope", f"has rotary positions only, {model.name} has {model.position}"),
        (model.bias != "none", f"has no biases, {model.name} has bias {model.bias}"),
        (
            model.window is not None,
            f"has no sliding window, {model.name} has a window of {model.window}",
        ),
        (model.logit_softcap is not None, "has no logit softcap"),
    ):
        if wrong:
            raise refuse("torchtitan", message, _elsewhere())


def _llama3(model: ModelSpec) -> TitanModel:
    shape = (model.layers, model.hidden, model.heads, model.kv_heads, model.ffn, model.vocab)
    if shape in _LLAMA3:
        return TitanModel("llama3", _LLAMA3[shape], True)
    # the width is 8/3 x dim x multiplier, rounded up to multiple_of, which is the width itself
    multiplier = (
        ""
        if 8 * model.hidden // 3 <= model.ffn
        else f", ffn_dim_multiplier={model.ffn / (4 * model.hidden):.4g}"
    )
    sizes = (
        f"dim={model.hidden}, n_layers={model.layers}, n_heads={model.heads}, "
        f"n_kv_heads={model.kv_heads}, "
        f"vocab_size={model.vocab}, multiple_of={model.ffn}{multiplier}, "
        f"norm_eps={model.norm_eps:g}, "
        f"rope_theta={model.rope.theta:.15g}, rope_scaling_args={_llama3_scaling(model.rope)}"
    )
    return TitanModel("llama3", model.name, True, f"TransformerModelArgs({sizes})")


def _qwen3(model: ModelSpec) -> TitanModel:
    moe = model.moe
    shape = (
        model.layers,
        model.hidden,
        model.heads,
        model.kv_heads,
        model.ffn,
        moe.experts if moe else 0,
    )
    flavor = _QWEN3.get(shape, "")
    own = (
        flavor
        and model.qk_norm
        and (model.head_dim, model.vocab, model.tie_embeddings)
        == (128, 151936, flavor in _QWEN3_TIED)
        and (moe is None or (moe.expert_ffn, moe.top_k) == (_QWEN3_EXPERT_FFN[flavor], 8))
    )
    if own:
        return TitanModel("qwen3", flavor, False)
    sizes = (
        f"dim={model.hidden}, n_layers={model.layers}, n_heads={model.heads}, "
        f"n_kv_heads={model.kv_heads}, "
        f"head_dim={model.head_dim}, hidden_dim={model.ffn}, vocab_size={model.vocab}, "
        f"qk_norm={model.qk_norm}, "
        f"norm_eps={model.norm_eps:g}, rope_theta={model.rope.theta:.15g}, "
        f"enable_weight_tying={model.tie_embeddings}"
    )
    if moe:
        sizes += f", moe_enabled=True, moe_inter_dim={moe.expert_ffn}, moe_args={_moe(model)}"
    return TitanModel("qwen3", model.name, False, f"Qwen3ModelArgs({sizes})")


def _deepseek(model: ModelSpec, *, cp: int) -> TitanModel:
    moe, mla = model.moe, model.mla
    if moe is None or mla is None or moe.every > 1:
        raise refuse(
            "torchtitan",
            "has latent attention only in deepseek_v3, a mixture-of-experts model",
            _elsewhere(),
        )
    if model.tie_embeddings:
        raise refuse(
            "torchtitan", "does not tie the embeddings of its deepseek_v3 model", _elsewhere()
        )
    rank = mla.q_lora_rank or 0
    shape = (
        model.layers,
        model.hidden,
        model.heads,
        model.ffn,
        moe.experts,
        moe.expert_ffn,
        rank,
        model.vocab,
    )
    heads = (mla.kv_lora_rank, mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.v_head_dim)
    # shipped flavors use FlexAttention, which context parallelism does not support; a registered
    # flavor uses the default
    if shape in _DEEPSEEK and heads == (512, 128, 64, 128) and cp == 1:
        return TitanModel("deepseek_v3", _DEEPSEEK[shape], True)
    sizes = (
        f"dim={model.hidden}, n_layers={model.layers}, n_dense_layers={moe.first_dense_layers}, "
        f"n_heads={model.heads}, "
        f"inter_dim={model.ffn}, moe_inter_dim={moe.expert_ffn}, vocab_size={model.vocab}, "
        f"q_lora_rank={rank}, "
        f"kv_lora_rank={mla.kv_lora_rank}, qk_nope_head_dim={mla.qk_nope_head_dim}, "
        f"qk_rope_head_dim={mla.qk_rope_head_dim}, v_head_dim={mla.v_head_dim}, "
        f"norm_eps={model.norm_eps:g}, "
        f"rope_theta={model.rope.theta:.15g}, rope_factor={_yarn_factor(model.rope):g}, "
        f"moe_args={_moe(model)}"
    )
    return TitanModel("deepseek_v3", model.name, True, f"DeepSeekV3ModelArgs({sizes})")


def _llama3_scaling(rope: Rope) -> str:
    """torchtitan's llama3 always rescales; a factor of 1 changes no frequency."""
    scaling = rope.scaling
    if scaling is None or scaling.name != "llama3":
        return "RoPEScalingArgs(scaling_factor=1.0)"
    return (
        f"RoPEScalingArgs(scaling_factor={scaling.factor:g}, "
        f"low_freq_factor={scaling.low_freq_factor:g}, "
        f"high_freq_factor={scaling.high_freq_factor:g}, "
        f"original_max_position_embeddings={scaling.original_max_seq_len or 8192})"
    )


def _yarn_factor(rope: Rope) -> float:
    return rope.scaling.factor if rope.scaling and rope.scaling.name == "yarn" else 1.0


def _note_constants(job: ExportJob, titan: TitanModel) -> None:
    """Notes constants of a shipped flavor and rotary scalings that differ from the model's."""
    model, rope = job.model, job.model.rope
    kind = rope.scaling.name if rope.scaling else "none"
    if kind != _SCALINGS[titan.name] and (
        rope.scaling is not None or (titan.name == "llama3" and not titan.registration)
    ):
        job.note(
            f"Rotary scaling of torchtitan's {titan.name} is {_SCALINGS[titan.name]}, of the "
            f"model {kind}"
        )
    if titan.registration:
        return
    theta, eps = _CONSTANTS[titan.name]
    theta = 5e6 if titan.flavor == "235B-A22B" else theta
    if (rope.theta, model.norm_eps) != (theta, eps):
        job.note(
            f"torchtitan's {titan.name} {titan.flavor} has rotary base {theta:g} and norm epsilon "
            f"{eps:g}, the model "
            f"{rope.theta:g} and {model.norm_eps:g}"
        )


def _moe(model: ModelSpec) -> str:
    moe = model.moe
    assert moe is not None
    # torchtitan's shared experts are one MLP with a multiple of the experts' width
    shared, rest = divmod(moe.shared_width, moe.expert_ffn)
    if rest:
        raise refuse(
            "torchtitan",
            f"requires shared experts of the routed width {moe.expert_ffn}",
            _elsewhere(),
        )
    groups = (
        f", num_expert_groups={moe.groups}, num_limited_groups={moe.groups_per_token}"
        if moe.groups
        else ""
    )
    return (
        f"MoEArgs(num_experts={moe.experts}, num_shared_experts={shared}, top_k={moe.top_k}, "
        f"score_func={moe.scoring!r}, route_norm={moe.renormalise}, "
        f"route_scale={moe.routed_scale:g}, "
        f"score_before_experts=False{groups})"
    )


def _elsewhere() -> str:
    return "Use megatron, deepspeed or accelerate, which may run it."

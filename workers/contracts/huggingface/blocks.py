"""Fields that most Hugging Face families share: sizes, the Llama block, activations, dropout."""

from __future__ import annotations

from typing import Any

from workers.contracts.huggingface.fields import ConfigFields, UnreadableConfig
from workers.contracts.huggingface.rotary import read_rope

Shape = dict[str, Any]

# gelu_new and gelu_pytorch_tanh are the same tanh approximation
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}


def sizes(
    config: ConfigFields, *, tied: bool = False, dropouts: dict[str, float] | None = None
) -> Shape:
    """The common sizes; `tied` is the family's default of `tie_word_embeddings`."""
    return {
        "layers": config.integer("num_hidden_layers"),
        "hidden": config.integer("hidden_size"),
        "heads": config.integer("num_attention_heads"),
        "ffn": config.integer("intermediate_size"),
        "vocab": config.integer("vocab_size"),
        "max_seq_len": config.integer("max_position_embeddings"),
        "tie_embeddings": config.flag("tie_word_embeddings", tied),
        "dropout": read_dropout(config, dropouts or {"attention_dropout": 0.0}),
    }


def llama_block(
    config: ConfigFields,
    *,
    theta: float = 10000.0,
    eps: float = 1e-6,
    dropouts: dict[str, float] | None = None,
    interleaved: bool = False,
) -> Shape:
    """The Llama block: RMSNorm, gated MLP, rotary positions, no bias."""
    shape = {
        **sizes(config, dropouts=dropouts),
        "norm": "rmsnorm",
        "norm_eps": config.number("rms_norm_eps", default=eps),
        "activation": read_activation(config, "hidden_act", "silu"),
        "rope": read_rope(config, theta=theta, interleaved=interleaved),
    }
    return shape | ({"head_dim": config.integer("head_dim")} if config.has("head_dim") else {})


def read_activation(config: ConfigFields, key: str, default: str) -> str:
    """ModelSpec's name of the activation under `key`. Raises UnreadableConfig."""
    name = config.text(key, default=default)
    if name not in _ACTIVATIONS:
        raise config.error(key, f"is {name!r}", f"Use one of {', '.join(_ACTIVATIONS)}.")
    return _ACTIVATIONS[name]


def read_window(config: ConfigFields) -> int | None:
    """`sliding_window`, None if it is absent or null."""
    return config.integer("sliding_window") if config.has("sliding_window") else None


def read_dropout(config: ConfigFields, defaults: dict[str, float]) -> float:
    """The dropout rate, which ModelSpec has once, so all of the keys must agree.

    0 when weights are loaded: it does not change their logits, and their training chooses its own.
    """
    if config.for_weights:
        return 0.0
    rates = {key: config.number(key, default=value) for key, value in defaults.items()}
    if len(set(rates.values())) > 1:
        listed = ", ".join(f"{key} {value:g}" for key, value in rates.items())
        raise config.error(
            next(iter(rates)),
            f"differs from the other rates ({listed})",
            "Use one rate everywhere, as ModelSpec does.",
        )
    if list(rates) == ["attention_dropout"] and rates["attention_dropout"]:
        raise config.error(
            "attention_dropout",
            f"is {rates['attention_dropout']:g}",
            "Set it to 0; ModelSpec drops everywhere or nowhere.",
        )
    return next(iter(rates.values()))


def partial_bias_error(config: ConfigFields, key: str) -> UnreadableConfig:
    """The exception for a bias on some linear layers only."""
    return config.error(
        key,
        "is true: it adds a bias to some linear layers only",
        "Set it to false; ModelSpec has bias none, qkv or all.",
    )

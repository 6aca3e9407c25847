"""What Hugging Face families spell alike: sizes, the Llama block, activations, dropout.

Knows single fields; does not know any family.
"""

from __future__ import annotations

from typing import Any

from orchestrator.planner.interchange.fields import Fields, Unreadable
from orchestrator.planner.interchange.rotary import rope_of

Shape = dict[str, Any]

# Hugging Face's activation names; gelu_new and gelu_pytorch_tanh are the same tanh approximation
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}


def sizes(config: Fields, *, tied: bool = False, dropouts: dict[str, float] | None = None) -> Shape:
    """What most families spell alike; `tied` is the family's default of `tie_word_embeddings`."""
    return {
        "layers": config.whole("num_hidden_layers"),
        "hidden": config.whole("hidden_size"),
        "heads": config.whole("num_attention_heads"),
        "ffn": config.whole("intermediate_size"),
        "vocab": config.whole("vocab_size"),
        "max_seq_len": config.whole("max_position_embeddings"),
        "tie_embeddings": config.flag("tie_word_embeddings", tied),
        "dropout": dropout(config, dropouts or {"attention_dropout": 0.0}),
    }


def gated(
    config: Fields,
    *,
    theta: float = 10000.0,
    eps: float = 1e-6,
    dropouts: dict[str, float] | None = None,
) -> Shape:
    """The Llama block: RMSNorm, gated MLP, rotary positions, no bias."""
    shape = {
        **sizes(config, dropouts=dropouts),
        "norm": "rmsnorm",
        "norm_eps": config.number("rms_norm_eps", default=eps),
        "activation": activation(config, "hidden_act", "silu"),
        "rope": rope_of(config, theta=theta),
    }
    return shape | ({"head_dim": config.whole("head_dim")} if config.has("head_dim") else {})


def activation(config: Fields, key: str, default: str) -> str:
    name = config.word(key, default=default)
    if name not in _ACTIVATIONS:
        raise config.refuse(key, f"is {name!r}", f"one of {', '.join(_ACTIVATIONS)} can be read")
    return _ACTIVATIONS[name]


def dropout(config: Fields, defaults: dict[str, float]) -> float:
    """ModelSpec has one rate for all places, so they must agree."""
    found = {key: config.number(key, default=value) for key, value in defaults.items()}
    if len(set(found.values())) > 1:
        listed = ", ".join(f"{key} {value:g}" for key, value in found.items())
        raise config.refuse(
            next(iter(found)),
            f"differs from the other rates ({listed})",
            "ModelSpec has one for all places",
        )
    if list(found) == ["attention_dropout"] and found["attention_dropout"]:
        raise config.refuse(
            "attention_dropout",
            f"is {found['attention_dropout']:g}",
            "ModelSpec drops everywhere or nowhere, set it to 0",
        )
    return next(iter(found.values()))


def bias_on_output(config: Fields, key: str) -> Unreadable:
    return config.refuse(
        key,
        "is true: it gives some linears a bias and others none",
        "ModelSpec has bias none, qkv or all, set it to false",
    )

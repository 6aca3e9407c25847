"""Families of the GPT block (LayerNorm, biases, plain MLP): GPT-2, StarCoder, GPT-NeoX, OPT.

One function per family maps its `config.json` to ModelSpec's fields. Defaults are those of the
family's own configuration class (transformers 5.23).
"""

from __future__ import annotations

from workers.contracts.huggingface.blocks import (
    Shape,
    read_activation,
    read_dropout,
    read_window,
    sizes,
)
from workers.contracts.huggingface.fields import ConfigFields
from workers.contracts.huggingface.rotary import read_rope

_LINEAR_BIAS = "its LayerNorms have a bias that its linear layers lack"


def starcoder2(config: ConfigFields) -> Shape:
    """StarCoder2."""
    config.require("use_bias", True, why=_LINEAR_BIAS)
    dropouts = {"residual_dropout": 0.0, "embedding_dropout": 0.0, "attention_dropout": 0.0}
    return {
        **sizes(config, tied=True, dropouts=dropouts),
        "kv_heads": config.integer("num_key_value_heads"),
        "norm_eps": config.number("norm_epsilon", default=1e-5),
        "norm": "layernorm",
        "bias": "all",
        "gated_mlp": False,
        "activation": read_activation(config, "hidden_act", "gelu_pytorch_tanh"),
        "rope": read_rope(config, theta=10000.0),
        "window": read_window(config),
    }


def gpt_neox(config: ConfigFields) -> Shape:
    """GPT-NeoX with a sequential block (RedPajama-INCITE); Pythia's and NeoX-20B's is parallel."""
    config.require(
        "use_parallel_residual",
        False,
        default=True,
        why="attention and MLP read the same input, ModelSpec's block runs them in sequence",
    )
    config.require("attention_bias", True, why="its other linear layers have a bias")
    dropouts = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    return {
        **sizes(config, dropouts=dropouts),
        "norm_eps": config.number("layer_norm_eps", default=1e-5),
        "norm": "layernorm",
        "bias": "all",
        "gated_mlp": False,
        "activation": read_activation(config, "hidden_act", "gelu"),
        "rope": read_rope(config, theta=10000.0, rotary_share=0.25),
    }


def gpt2(config: ConfigFields) -> Shape:
    """GPT-2."""
    config.require(
        "scale_attn_weights", True, why="scores are not divided by the square root of head_dim"
    )
    config.require(
        "scale_attn_by_inverse_layer_idx", False, why="scores are scaled differently in each layer"
    )
    config.require("add_cross_attention", False, why="it reads an encoder")
    hidden = config.integer("n_embd", default=768)
    return {
        "layers": config.integer("n_layer", default=12),
        "hidden": hidden,
        "heads": config.integer("n_head", default=12),
        "ffn": config.integer("n_inner", default=4 * hidden),
        "vocab": config.integer("vocab_size", default=50257),
        "max_seq_len": config.integer("n_positions", "n_ctx", default=1024),
        "norm_eps": config.number("layer_norm_epsilon", default=1e-5),
        "tie_embeddings": config.flag("tie_word_embeddings", True),
        "dropout": read_dropout(config, {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}),
        "norm": "layernorm",
        "position": "learned",
        "bias": "all",
        "gated_mlp": False,
        "activation": read_activation(config, "activation_function", "gelu_new"),
    }


def gpt_bigcode(config: ConfigFields) -> Shape:
    """StarCoder and SantaCoder: GPT-2 with one key-value head."""
    shape = gpt2(config)
    shape["activation"] = read_activation(config, "activation_function", "gelu_pytorch_tanh")
    return {**shape, "kv_heads": 1 if config.flag("multi_query", True) else shape["heads"]}


def opt(config: ConfigFields) -> Shape:
    """OPT of all sizes except 350M.

    Its position table has two rows more than positions; `max_seq_len` counts them.
    """
    hidden = config.integer("hidden_size")
    config.require("do_layer_norm_before", True, why="its norms come after attention and MLP")
    config.require("_remove_final_layer_norm", False, why="the last norm is missing")
    config.require("enable_bias", True, why=_LINEAR_BIAS)
    config.require("layer_norm_elementwise_affine", True, why="its norms have no weights")
    if config.has("word_embed_proj_dim"):
        config.require(
            "word_embed_proj_dim", hidden, why="embeddings are projected to another width"
        )
    return {
        "layers": config.integer("num_hidden_layers"),
        "hidden": hidden,
        "heads": config.integer("num_attention_heads"),
        "ffn": config.integer("ffn_dim"),
        "vocab": config.integer("vocab_size"),
        "max_seq_len": config.integer("max_position_embeddings") + 2,
        "tie_embeddings": config.flag("tie_word_embeddings", True),
        # published files have attention_dropout 0 and dropout 0.1: memory follows the larger rate
        "dropout": config.number("dropout", default=0.1),
        "norm": "layernorm",
        "position": "learned",
        "bias": "all",
        "gated_mlp": False,
        "activation": read_activation(config, "activation_function", "relu"),
    }

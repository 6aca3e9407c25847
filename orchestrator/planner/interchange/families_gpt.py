"""Families of the GPT block, LayerNorm, biases and a plain MLP: GPT-2, StarCoder, GPT-NeoX, OPT.

One function a family, from its `config.json` to ModelSpec's fields. Defaults are those of the
family's own
configuration class (transformers 5.23).
"""

from __future__ import annotations

from orchestrator.planner.interchange.fields import Fields
from orchestrator.planner.interchange.parts import Shape, activation, dropout, sizes
from orchestrator.planner.interchange.rotary import rope_of


def starcoder2(config: Fields) -> Shape:
    config.want(
        "use_bias", True, default=True, why="its LayerNorms keep a bias that its linears then lack"
    )
    dropouts = {"residual_dropout": 0.0, "embedding_dropout": 0.0, "attention_dropout": 0.0}
    return {
        **sizes(config, tied=True, dropouts=dropouts),
        "kv_heads": config.whole("num_key_value_heads"),
        "norm_eps": config.number("norm_epsilon", default=1e-5),
        "norm": "layernorm",
        "bias": "all",
        "gated_mlp": False,
        "activation": activation(config, "hidden_act", "gelu_pytorch_tanh"),
        "rope": rope_of(config, theta=10000.0),
        "window": config.whole("sliding_window") if config.has("sliding_window") else None,
    }


def gpt_neox(config: Fields) -> Shape:
    """GPT-NeoX with a sequential block (RedPajama-INCITE); Pythia and NeoX-20B add both branches at
    once.
    """
    config.want(
        "use_parallel_residual",
        False,
        default=True,
        why="attention and MLP read the same input, ModelSpec's block runs them in turn",
    )
    config.want("attention_bias", True, default=True, why="its other linears have a bias")
    dropouts = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    return {
        **sizes(config, dropouts=dropouts),
        "norm_eps": config.number("layer_norm_eps", default=1e-5),
        "norm": "layernorm",
        "bias": "all",
        "gated_mlp": False,
        "activation": activation(config, "hidden_act", "gelu"),
        "rope": rope_of(config, theta=10000.0, rotary_share=0.25),
    }


def gpt2(config: Fields) -> Shape:
    config.want(
        "scale_attn_weights",
        True,
        default=True,
        why="scores are not divided by the root of head_dim",
    )
    config.want(
        "scale_attn_by_inverse_layer_idx",
        False,
        default=False,
        why="scores are scaled layer by layer",
    )
    config.want("add_cross_attention", False, default=False, why="it reads an encoder")
    hidden = config.whole("n_embd")
    return {
        "layers": config.whole("n_layer"),
        "hidden": hidden,
        "heads": config.whole("n_head"),
        "ffn": config.whole("n_inner", default=4 * hidden),
        "vocab": config.whole("vocab_size"),
        "max_seq_len": config.whole("n_positions", "n_ctx"),
        "norm_eps": config.number("layer_norm_epsilon", default=1e-5),
        "tie_embeddings": config.flag("tie_word_embeddings", True),
        "dropout": dropout(config, {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}),
        "norm": "layernorm",
        "position": "learned",
        "bias": "all",
        "gated_mlp": False,
        "activation": activation(config, "activation_function", "gelu_new"),
    }


def gpt_bigcode(config: Fields) -> Shape:
    """StarCoder and SantaCoder: GPT-2 with one key-value head."""
    shape = gpt2(config)
    shape["activation"] = activation(config, "activation_function", "gelu_pytorch_tanh")
    return {**shape, "kv_heads": 1 if config.flag("multi_query", True) else shape["heads"]}


def opt(config: Fields) -> Shape:
    """OPT of all sizes but 350M.

    Its table of positions has two rows more than tokens, which `max_seq_len` counts.
    """
    hidden = config.whole("hidden_size")
    config.want(
        "do_layer_norm_before", True, default=True, why="its norms come after attention and MLP"
    )
    config.want("_remove_final_layer_norm", False, default=False, why="the last norm is missing")
    config.want(
        "enable_bias",
        True,
        default=True,
        why="its LayerNorms keep a bias that its linears then lack",
    )
    config.want(
        "layer_norm_elementwise_affine", True, default=True, why="its norms have no weights"
    )
    if config.has("word_embed_proj_dim"):
        config.want(
            "word_embed_proj_dim",
            hidden,
            default=hidden,
            why="embeddings are projected to another width",
        )
    return {
        "layers": config.whole("num_hidden_layers"),
        "hidden": hidden,
        "heads": config.whole("num_attention_heads"),
        "ffn": config.whole("ffn_dim"),
        "vocab": config.whole("vocab_size"),
        "max_seq_len": config.whole("max_position_embeddings") + 2,
        "tie_embeddings": config.flag("tie_word_embeddings", True),
        # attention_dropout is 0 in every published file while dropout is 0.1: memory follows the
        # larger
        "dropout": config.number("dropout", default=0.1),
        "norm": "layernorm",
        "position": "learned",
        "bias": "all",
        "gated_mlp": False,
        "activation": activation(config, "activation_function", "relu"),
    }

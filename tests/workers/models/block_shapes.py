"""Small decoders of each kind of block, and one pass forward and backward through them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from workers.contracts.specs.model import ModelSpec
from workers.models.decoder import Decoder
from workers.models.initialize import initialize
from workers.models.layers.documents import Documents

SIZES = {
    "layers": 2,
    "hidden": 32,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 40,
    "vocab": 45,
    "max_seq_len": 64,
}
MLA = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"tie_embeddings": False},
    "gpt-2": {
        "norm": "layernorm",
        "position": "learned",
        "bias": "all",
        "gated_mlp": False,
        "activation": "gelu_tanh",
        "kv_heads": 4,
        "tie_embeddings": True,
    },
    "latent": {"attention": "mla", "mla": MLA, "rope": {"interleaved": True}},
    "factorized, qk norms": {
        "attention": "mfa",
        "mfa": {"qk_rank": 12, "head_dim": 8, "heads": 6},
        "qk_norm": True,
    },
    "window, experts": {
        "window": 7,
        "moe": {"experts": 4, "top_k": 2, "expert_ffn": 16, "shared_experts": 1},
    },
    "capped": {"logit_softcap": 3.0, "tie_embeddings": False},
}
TOKENS = torch.arange(60).reshape(2, 30) % 45


def built(name: str, **more: Any) -> Decoder:
    spec = ModelSpec.from_dict({**SIZES, **SHAPES[name], **more})
    decoder = Decoder(spec)
    initialize(decoder, layers=spec.layers, seed=1)
    return decoder


def gradients(
    decoder: Decoder, documents: Documents | None, tokens: Tensor = TOKENS
) -> dict[str, Tensor]:
    """The loss, and every parameter's gradient by its name; none may lack one."""
    decoder.zero_grad()
    logits = decoder(tokens, documents)
    loss = functional.cross_entropy(
        logits.flatten(0, 1), tokens.roll(-1, 1).flatten(), reduction="sum"
    )
    loss.backward()
    result = {name: parameter.grad for name, parameter in decoder.named_parameters()}
    missing = [name for name, gradient in result.items() if gradient is None]
    assert not missing, missing
    return {
        "loss": loss.detach(),
        **{name: gradient for name, gradient in result.items() if gradient is not None},
    }

"""Names and layouts of a family's tensors in Hugging Face files, converted to ours and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from workers.contracts.specs.model import ModelSpec
from workers.models.weights.parameter_shapes import weight_shapes

Layout = Literal["same", "transposed", "joined", "joined_transposed", "stacked"]

_LLAMA = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "blocks": "model.layers",
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attn": "self_attn",
    "q": "q_proj",
    "k": "k_proj",
    "v": "v_proj",
    "o": "o_proj",
    "q_down": "q_a_proj",
    "q_latent_norm": "q_a_layernorm",
    "q_up": "q_b_proj",
    "kv_down": "kv_a_proj_with_mqa",
    "kv_latent_norm": "kv_a_layernorm",
    "kv_up": "kv_b_proj",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
    "router": "gate",
    "choice_bias": "e_score_correction_bias",
    "shared": "shared_experts",
}
_MIXTRAL = {**_LLAMA, "mlp": "block_sparse_moe", "gate": "w1", "down": "w2", "up": "w3"}
_GPT2 = {
    "embed": "transformer.wte",
    "positions": "transformer.wpe",
    "norm": "transformer.ln_f",
    "head": "lm_head",
    "blocks": "transformer.h",
    "attn_norm": "ln_1",
    "mlp_norm": "ln_2",
    "q": "c_attn",
    "o": "c_proj",
    "up": "c_fc",
    "down": "c_proj",
}
_TABLES = {"gpt2": _GPT2, "mixtral": _MIXTRAL}


@dataclass(frozen=True, slots=True)
class Entry:
    """Tensor names with the same numbers, `ours` and `theirs` (Hugging Face's).

    transposed: GPT-2's Conv1D is `[in, out]`; joined: queries, keys and values are one tensor of
    theirs; stacked: one tensor of ours has all experts.
    """

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    layout: Layout = "same"

    def to_ours(self, tensors: list[Tensor]) -> list[Tensor]:
        """Our tensors from theirs."""
        if self.layout == "stacked":
            return [torch.stack(tensors)]
        joined = tensors[0].T if self.layout in ("transposed", "joined_transposed") else tensors[0]
        return list(joined.chunk(len(self.ours))) if len(self.ours) > 1 else [joined]

    def to_theirs(self, tensors: list[Tensor]) -> list[Tensor]:
        """Their tensors from ours."""
        if self.layout == "stacked":
            return list(tensors[0].unbind())
        joined = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
        return [joined.T if self.layout in ("transposed", "joined_transposed") else joined]


def tensor_entries(spec: ModelSpec, family: str) -> list[Entry]:
    """All weights of the model in the family's names, in the model's order."""
    table = _TABLES.get(family, _LLAMA)
    entries = []
    for name, shape in weight_shapes(spec).items():
        parts = name.split(".")
        theirs = ".".join(table.get(part, part) for part in parts)
        if spec.scalar_head and parts[0] == "head":
            theirs = "score.weight"
        if family == "gpt2" and parts[0] == "blocks":
            if parts[-2] in ("k", "v"):
                continue  # with q
            names = (
                tuple(".".join([*parts[:-2], part, parts[-1]]) for part in "qkv")
                if parts[-2] == "q"
                else (name,)
            )
            transposed = len(shape) == 2
            if len(names) > 1:
                entries.append(
                    Entry(names, (theirs,), "joined_transposed" if transposed else "joined")
                )
            else:
                entries.append(Entry(names, (theirs,), "transposed" if transposed else "same"))
        elif "experts" in parts:
            before, after = theirs.split(".experts.")
            numbered = tuple(f"{before}.experts.{number}.{after}" for number in range(shape[0]))
            entries.append(Entry((name,), numbered, "stacked"))
        else:
            entries.append(Entry((name,), (theirs,)))
    return entries

"""A contender of the speed benchmark: a decoder and training loop in plain PyTorch, nanoGPT style.

One file, no abstraction beyond nn.Module: joined query-key-value projection, torch's attention
kernel, fused AdamW, torch's gradient clipping. Weights have Hugging Face names. It uses no code of
Orrery, except its matrix products if the `helped` argument is set.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from tests.bench.turns import Turns
from workers.training.numerics.cpu_matmul import prefer_onednn


class SelfAttention(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.heads = config["heads"]
        self.c_attn = nn.Linear(config["hidden"], 3 * config["hidden"], bias=config["bias"])
        self.c_proj = nn.Linear(config["hidden"], config["hidden"], bias=config["bias"])

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        batch, length, hidden = x.size()
        q, k, v = self.c_attn(x).split(hidden, dim=2)
        q = q.view(batch, length, self.heads, hidden // self.heads).transpose(1, 2)
        k = k.view(batch, length, self.heads, hidden // self.heads).transpose(1, 2)
        v = v.view(batch, length, self.heads, hidden // self.heads).transpose(1, 2)
        if rotation is not None:
            q, k = rotate(q, *rotation), rotate(k, *rotation)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, hidden))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class GptMlp(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config["hidden"], config["ffn"], bias=config["bias"])
        self.c_proj = nn.Linear(config["ffn"], config["hidden"], bias=config["bias"])

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(functional.gelu(self.c_fc(x), approximate="tanh"))


class LlamaMlp(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.w1 = nn.Linear(config["hidden"], config["ffn"], bias=False)
        self.w2 = nn.Linear(config["ffn"], config["hidden"], bias=False)
        self.w3 = nn.Linear(config["hidden"], config["ffn"], bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.ln_1 = norm(config)
        self.attn = SelfAttention(config)
        self.ln_2 = norm(config)
        self.mlp = LlamaMlp(config) if config["llama"] else GptMlp(config)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        x = x + self.attn(self.ln_1(x), rotation)
        return x + self.mlp(self.ln_2(x))


def norm(config: dict[str, Any]) -> nn.Module:
    kind = nn.RMSNorm if config["llama"] else nn.LayerNorm
    return kind(config["hidden"], eps=config["norm_eps"])


class Model(nn.Module):
    """Token ids and targets `[B, S]` → logits `[B, S, vocab]` and the mean loss.

    Head and embedding share one weight.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.wte = nn.Embedding(config["vocab"], config["hidden"])
        self.wpe = (
            None if config["llama"] else nn.Embedding(config["max_seq_len"], config["hidden"])
        )
        self.h = nn.ModuleList(Block(config) for _ in range(config["layers"]))
        self.ln_f = norm(config)
        self.lm_head = nn.Linear(config["hidden"], config["vocab"], bias=False)
        self.lm_head.weight = self.wte.weight
        size = config["hidden"] // config["heads"]
        frequency = config["rope_theta"] ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        angle = torch.arange(config["max_seq_len"])[:, None] * frequency
        self.register_buffer("cos", angle.cos().float(), persistent=False)
        self.register_buffer("sin", angle.sin().float(), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        length, rotation = tokens.size(1), None
        x = self.wte(tokens)
        if self.wpe is None:
            rotation = self.cos[:length], self.sin[:length]
        else:
            x = x + self.wpe(torch.arange(length, device=tokens.device))
        for block in self.h:
            x = block(x, rotation)
        logits = self.lm_head(self.ln_f(x))
        loss = functional.cross_entropy(
            logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1
        )
        return logits, loss


def load(model: Model, folder: Path, config: dict[str, Any]) -> None:
    """Copies Hugging Face's Llama or GPT-2 tensors; GPT-2 stores them as `[in, out]`."""
    source = load_file(folder / "model.safetensors")
    state: dict[str, Tensor] = {}
    if config["llama"]:
        state |= {
            "wte.weight": source["model.embed_tokens.weight"],
            "ln_f.weight": source["model.norm.weight"],
        }
        for layer in range(config["layers"]):
            block = {
                name.split(".", 3)[3]: tensor
                for name, tensor in source.items()
                if name.startswith(f"model.layers.{layer}.")
            }
            renamed = {
                "ln_1.weight": block["input_layernorm.weight"],
                "attn.c_attn.weight": torch.cat(
                    [block[f"self_attn.{name}_proj.weight"] for name in "qkv"]
                ),
                "attn.c_proj.weight": block["self_attn.o_proj.weight"],
                "ln_2.weight": block["post_attention_layernorm.weight"],
                "mlp.w1.weight": block["mlp.gate_proj.weight"],
                "mlp.w2.weight": block["mlp.down_proj.weight"],
                "mlp.w3.weight": block["mlp.up_proj.weight"],
            }
            state |= {f"h.{layer}.{name}": tensor for name, tensor in renamed.items()}
    else:
        for name, tensor in source.items():
            transposed = tensor.ndim == 2 and ".h." in name
            state[name.removeprefix("transformer.")] = tensor.T if transposed else tensor
    state["lm_head.weight"] = state["wte.weight"]
    model.load_state_dict(state)


def train(model: Model, job: dict[str, Any], turns: Turns) -> list[float]:
    """nanoGPT's loop: batch, forward, backward, clip, step. Returns the losses."""
    windows = np.memmap(job["windows"], dtype=np.uint16, mode="r").reshape(-1, job["seq_len"] + 1)
    decayed = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    rest = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [
        {"params": decayed, "weight_decay": job["weight_decay"]},
        {"params": rest, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=job["lr"], betas=(0.9, 0.95), fused=job["fused"])
    losses = []
    turns.begin()
    for step in range(job["steps"]):
        for group in optimizer.param_groups:
            group["lr"] = job["lr"]
        rows = range(step * job["batch"], (step + 1) * job["batch"])
        x = torch.stack([torch.from_numpy(windows[row, :-1].astype(np.int64)) for row in rows])
        y = torch.stack([torch.from_numpy(windows[row, 1:].astype(np.int64)) for row in rows])
        _, loss = model(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), job["clip_norm"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        turns.stepped()
    return [float(loss) for loss in losses]


def main() -> None:
    turns, job = Turns(int(sys.argv[1])), json.loads(Path(sys.argv[2]).read_text())
    if "helped" in sys.argv:
        prefer_onednn()
    model = Model(job["config"])
    load(model, Path(job["hugging_face"]), job["config"])
    losses = train(model, job, turns)
    assert math.isfinite(losses[-1])
    turns.end(loss=sum(losses[-10:]) / 10, threads=torch.get_num_threads())


if __name__ == "__main__":
    main()

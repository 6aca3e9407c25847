"""The job of the GRPO benchmarks: the same weights, prompts and settings for both contenders."""

from __future__ import annotations

from typing import Any

# a tiny model whose 50 recorded steps are committed as `golden/grpo_trl.json`
TINY: dict[str, Any] = {
    "name": "recorded",
    "layers": 2,
    "hidden": 32,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 80,
    "vocab": 256,
    "max_seq_len": 32,
    "tie_embeddings": False,
}
STEPS, PROMPTS, GROUP, LONGEST, SEQ_LEN = 50, 2, 4, 8, 16
LR, BETAS, CLIP_NORM = 2e-3, [0.9, 0.999], 1.0


def recorded_spec(prompts: str, checkpoint_every: int = STEPS) -> dict[str, Any]:
    """The run whose rollouts TRL repeats: Dr. GRPO, whose formulas are equal in both."""
    return {
        "kind": "train",
        "model": TINY,
        "plan": {
            "global_batch_size": PROMPTS * GROUP,
            "micro_batch_size": PROMPTS * GROUP,
        },
        "data": {"path": prompts, "format": "prompt_completion"},
        "train": {
            "objective": "grpo",
            "steps": STEPS,
            "seq_len": SEQ_LEN,
            "seed": 5,
            "optimizer": {"name": "adamw", "lr": LR, "betas": BETAS, "weight_decay": 0.0},
            "clip_norm": CLIP_NORM,
            "checkpoint": {"every_steps": checkpoint_every, "async": False},
            "grpo": {
                "algorithm": "dr_grpo",
                "group_size": GROUP,
                "prompts_per_step": PROMPTS,
                "rewards": [{"kind": "regex", "pattern": "[0-9a-z]"}],
                "rollout": {"max_new_tokens": LONGEST},
            },
        },
    }


def prompt_lines() -> list[dict[str, str]]:
    """The prompts of the recorded run."""
    return [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(12)]

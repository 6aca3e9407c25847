"""The job of the benchmark of a GRPO step: equal weights, prompts and answer lengths for both.

Does not import torch before `write_job`; TRL's side reads the written files alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MODEL = "smollm2-135m"
PROMPTS, GROUP, MICRO = 8, 8, 8
PROMPT_TOKENS, SHORTEST, LONGEST = 32, 16, 128
LR = 1e-6


def write_job(folder: Path, *, steps: int, layers: int | None = None) -> Path:
    """Random weights of SmolLM2's shape with a tokenizer of words; prompts, answer lengths.

    `layers` are fewer of its 30, for a short run.
    """
    import numpy as np
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers

    from tests.bench.bench_speed import InitialWeights
    from workers.contracts.catalog.presets import preset
    from workers.models.hf.saving import save_hugging_face

    torch.set_num_threads(1)
    base = folder / "base"
    base.mkdir()
    shape = preset(MODEL)
    if layers is not None:
        shape = shape.model_copy(update={"layers": layers})
    save_hugging_face(InitialWeights(shape, seed=1), base)
    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(shape.vocab)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(base / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w0", "pad_token": "w0"}
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    generator = np.random.default_rng(3)
    prompts = [
        {"prompt": " ".join(f"w{n}" for n in generator.integers(1, shape.vocab, PROMPT_TOKENS))}
        for _ in range(PROMPTS * steps)
    ]
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in prompts))
    lengths = generator.integers(SHORTEST, LONGEST + 1, (steps, PROMPTS * GROUP))
    job: dict[str, Any] = {
        "model": shape.to_dict(),
        "base": str(base),
        "prompts": str(path),
        "lengths": lengths.tolist(),
        "steps": steps,
        "rows": PROMPTS * GROUP,
        "micro": MICRO,
        "group": GROUP,
        "longest": LONGEST,
        "lr": LR,
    }
    (folder / "job.json").write_text(json.dumps(job))
    return folder / "job.json"


def spec(job: dict[str, Any]) -> dict[str, Any]:
    """Orrery's run of the job."""
    return {
        "kind": "train",
        "model": job["model"],
        "plan": {"micro_batch_size": job["micro"], "global_batch_size": job["rows"]},
        "data": {"path": job["prompts"], "format": "prompt_completion"},
        "train": {
            "objective": "grpo",
            "grpo": {
                "algorithm": "dr_grpo",
                "group_size": job["group"],
                "prompts_per_step": job["rows"] // job["group"],
                "rewards": [{"kind": "regex", "pattern": "[13579] *$"}],
                "rollout": {"max_new_tokens": job["longest"]},
            },
            "init_from": {"path": job["base"]},
            "steps": job["steps"],
            "seq_len": PROMPT_TOKENS + job["longest"],
            "optimizer": {
                "name": "adamw",
                "lr": job["lr"],
                "betas": [0.9, 0.999],
                "weight_decay": 0.0,
            },
            "clip_norm": 1.0,
        },
    }

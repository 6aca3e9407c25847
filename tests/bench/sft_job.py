"""The job of the LoRA benchmark: the same weights, rows and settings for both contenders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from workers.contracts.catalog.presets import preset
from workers.models.hf.saving import save_hugging_face

MODEL = "smollm2-135m"
BATCH, SEQ_LEN, RANK = 4, 256, 16
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def write_job(folder: Path, *, steps: int) -> Path:
    """Random weights of SmolLM2's shape in Hugging Face's format, and rows of token ids."""
    from tests.bench.bench_speed import InitialWeights

    torch.set_num_threads(1)
    base = folder / "base"
    base.mkdir()
    shape = preset(MODEL)
    save_hugging_face(InitialWeights(shape, seed=1), base)
    generator = np.random.default_rng(3)
    rows = generator.integers(1, shape.vocab, (steps * BATCH, SEQ_LEN + 1)).tolist()
    # every row is a prompt of a quarter and an answer, of full length: no padding on either side
    job: dict[str, Any] = {
        "base": str(base),
        "rows": rows,
        "prompt": SEQ_LEN // 4,
        "steps": steps,
        "batch": BATCH,
        "seq_len": SEQ_LEN,
        "rank": RANK,
        "lr": 1e-3,
    }
    (folder / "job.json").write_text(json.dumps(job))
    return folder / "job.json"


def spec(job: dict[str, Any]) -> dict[str, Any]:
    """The engine's run of the job."""
    optimizer = {"name": "adamw", "lr": job["lr"], "betas": [0.9, 0.999], "weight_decay": 0.0}
    return {
        "kind": "train",
        "model": MODEL,
        "plan": {"micro_batch_size": job["batch"], "global_batch_size": job["batch"]},
        "train": {
            "objective": "sft",
            "sft": {"packing": False},
            "steps": job["steps"],
            "seq_len": job["seq_len"],
            "optimizer": optimizer,
            "clip_norm": 1.0,
            "samples": {"count": 0},
            "init_from": {"path": job["base"]},
            "adapter": {"method": "lora", "rank": job["rank"], "alpha": 2 * job["rank"]},
        },
    }

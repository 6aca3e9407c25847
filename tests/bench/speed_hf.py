"""A contender of the speed benchmark: Hugging Face's Trainer with its Llama or GPT-2 model.

It uses its own defaults, except for what all contenders share: batch size, sample order, learning
rate, clipping and no saving.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from tests.bench.turns import Turns


class Windows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """The job's samples as inputs and shifted labels."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.rows = np.memmap(job["windows"], dtype=np.uint16, mode="r").reshape(
            -1, job["seq_len"] + 1
        )

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = torch.from_numpy(self.rows[index].astype(np.int64))
        return {"input_ids": row[:-1], "labels": row[:-1], "shift_labels": row[1:]}


class Gate(TrainerCallback):
    """Waits for the contender's turns at the start and after each step."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns

    def on_train_begin(self, *args: Any, **more: Any) -> None:
        self.turns.begin()

    def on_step_end(self, *args: Any, **more: Any) -> None:
        self.turns.stepped()


def main() -> None:
    turns, job, folder = (
        Turns(int(sys.argv[1])),
        json.loads(Path(sys.argv[2]).read_text()),
        Path(sys.argv[3]),
    )
    model = AutoModelForCausalLM.from_pretrained(job["hugging_face"], dtype=torch.float32)
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=job["steps"],
        per_device_train_batch_size=job["batch"],
        train_sampling_strategy="sequential",
        learning_rate=job["lr"],
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        weight_decay=job["weight_decay"],
        max_grad_norm=job["clip_norm"],
        logging_steps=5,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        torch_compile="compiled" in sys.argv[4:],
    )
    trainer = Trainer(
        model=model, args=arguments, train_dataset=Windows(job), callbacks=[Gate(turns)]
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    options = {"attention": model.config._attn_implementation, "optimizer": str(arguments.optim)}
    turns.end(loss=sum(losses[-2:]) / 2, threads=torch.get_num_threads(), **options)


if __name__ == "__main__":
    main()

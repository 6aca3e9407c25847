"""A contender of the LoRA benchmark: TRL's SFTTrainer with PEFT's LoRA, which a peer's user runs.

Needs trl and peft on PYTHONPATH. Only the preparation of data is left out: rows are token ids.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import datasets
import peft
import pyarrow
import torch
import trl
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback

from tests.bench.sft_job import TARGETS
from tests.bench.turns import Turns


class Gate(TrainerCallback):
    """Waits for the contender's turns at the start and after each step."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns

    def on_train_begin(self, *args: Any, **more: Any) -> None:
        self.turns.begin()

    def on_step_end(self, *args: Any, **more: Any) -> None:
        self.turns.stepped()


class Prepared(trl.SFTTrainer):
    """The trainer on rows that are prepared already."""

    def _prepare_dataset(self, dataset: Any, *args: Any, **more: Any) -> Any:
        return dataset


def main() -> None:
    from tokenizers import Tokenizer, models

    turns, job, folder = (
        Turns(int(sys.argv[1])),
        json.loads(Path(sys.argv[2]).read_text()),
        Path(sys.argv[3]),
    )
    model = AutoModelForCausalLM.from_pretrained(job["base"], dtype=torch.float32)
    length, prompt = job["seq_len"], job["prompt"]
    data = [
        {"input_ids": ids[:length], "labels": [-100] * prompt + ids[prompt:length]}
        for ids in job["rows"]
    ]
    arguments = trl.SFTConfig(
        output_dir=str(folder),
        max_steps=job["steps"],
        per_device_train_batch_size=job["batch"],
        gradient_checkpointing=False,
        train_sampling_strategy="sequential",
        learning_rate=job["lr"],
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        max_length=None,
    )
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    table = datasets.table.InMemoryTable(pyarrow.Table.from_pylist(data))
    trainer = Prepared(
        model=model,
        args=arguments,
        train_dataset=datasets.Dataset(table, fingerprint="rows"),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=words, pad_token="a", eos_token="b"
        ),
        peft_config=peft.LoraConfig(
            r=job["rank"], lora_alpha=2 * job["rank"], target_modules=TARGETS
        ),
        callbacks=[Gate(turns)],
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "grad_norm" in entry]
    turns.end(losses=losses, threads=torch.get_num_threads(), optimizer=str(arguments.optim))


if __name__ == "__main__":
    main()

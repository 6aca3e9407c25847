"""A contender of the benchmark of a GRPO step: TRL's GRPOTrainer, which generates by transformers.

Runs under a Python that has trl 1.16. A logits processor ends each answer at the job's length and
lets no stop token end it before.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import torch
import trl
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    TrainerCallback,
)

from tests.bench.turns import Turns


class Gate(TrainerCallback):
    """Waits for the contender's turns at the start and after each step."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns

    def on_train_begin(self, *args: Any, **more: Any) -> None:
        self.turns.begin()

    def on_step_end(self, *args: Any, **more: Any) -> None:
        self.turns.stepped()


class Lengths(LogitsProcessor):
    """Only the end token at an answer's length, any other before."""

    def __init__(self, lengths: list[int], *, prompt: int, end: int) -> None:
        self.lengths, self.prompt, self.end = torch.tensor(lengths), prompt, end

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        ends = input_ids.shape[1] - self.prompt + 1 >= self.lengths
        scores = scores.clone()
        end = scores[:, self.end].clone()
        scores[ends] = float("-inf")
        scores[:, self.end] = torch.where(ends, end, float("-inf"))
        return scores


def main() -> None:
    turns = Turns(int(sys.argv[1]))
    job, folder = json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3])
    model = AutoModelForCausalLM.from_pretrained(job["base"], dtype=torch.float32)
    words = PreTrainedTokenizerFast.from_pretrained(job["base"])
    generate, lengths, generation_s, tokens = model.generate, iter(job["lengths"]), [], []

    def generate_to_length(**given: Any) -> Any:
        of_step = next(lengths)
        began = time.perf_counter()
        prompt = given["input_ids"].shape[1]
        processor = Lengths(of_step, prompt=prompt, end=words.eos_token_id)
        made = generate(**given, logits_processor=LogitsProcessorList([processor]))
        generation_s.append(time.perf_counter() - began)
        tokens.append(int(made.shape[0] * (made.shape[1] - prompt)))
        return made

    model.generate = generate_to_length

    def reward(completions: list[str], **more: Any) -> list[float]:
        return [float(each.strip()[-1:] in "13579") for each in completions]

    rows, micro = job["rows"], job["micro"]
    arguments = trl.GRPOConfig(
        output_dir=str(folder),
        max_steps=job["steps"],
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=rows // micro,
        num_generations=job["group"],
        max_completion_length=job["longest"],
        beta=0.0,
        loss_type="dr_grpo",
        scale_rewards="none",
        learning_rate=job["lr"],
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        shuffle_dataset=False,
        dataloader_pin_memory=False,
    )
    lines = [json.loads(line) for line in Path(job["prompts"]).read_text().splitlines()]
    table = datasets.table.InMemoryTable(pyarrow.Table.from_pylist(lines))
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=arguments,
        train_dataset=datasets.Dataset(table, fingerprint="rows"),
        processing_class=words,
        callbacks=[Gate(turns)],
    )
    trainer.train()
    turns.end(
        computed=tokens, phases={"generation_s": generation_s}, threads=torch.get_num_threads()
    )


if __name__ == "__main__":
    main()

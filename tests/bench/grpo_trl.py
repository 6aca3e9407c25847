"""TRL's GRPOTrainer on recorded rollouts: its losses and gradient norms, one per step.

Run with a Python that has trl 1.16: `python -m tests.bench.grpo_trl FOLDER`, where FOLDER holds
`base/` (a Hugging Face model) and `job.json` (steps of rollouts). Writes `trl.json` there. Only
generation and rewards are replaced, by TRL's own `rollout_func`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import torch
import trl
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast


class Recorded(trl.GRPOTrainer):
    """The trainer, with unrounded losses and mean log-probabilities of the sampled tokens."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.curve: list[float] = []

    def compute_loss(self, *args: Any, **more: Any) -> Any:
        loss = super().compute_loss(*args, **more)
        self.curve.append(float(loss.detach()))
        return loss


def main() -> None:
    from tokenizers import Tokenizer, models

    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    job = json.loads((folder / "job.json").read_text())
    steps = iter(job["rollouts"])
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)

    def recorded(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        rows = next(steps)
        return {
            "prompt_ids": [row["prompt_ids"] for row in rows],
            "completion_ids": [row["token_ids"] for row in rows],
            "logprobs": [row["logprobs"] for row in rows],
            "recorded": [row["reward"] for row in rows],
        }

    def reward(prompts: Any, completions: Any, recorded: list[float], **more: Any) -> list[float]:
        return recorded

    rows, group = job["rows"], job["group"]
    arguments = trl.GRPOConfig(
        output_dir=str(folder / "trl"),
        max_steps=len(job["rollouts"]),
        per_device_train_batch_size=rows,
        num_generations=group,
        max_completion_length=job["longest"],
        beta=0.0,
        loss_type="dr_grpo",
        scale_rewards="none",
        learning_rate=job["lr"],
        lr_scheduler_type="constant",
        adam_beta1=job["betas"][0],
        adam_beta2=job["betas"][1],
        adam_epsilon=1e-8,
        weight_decay=0.0,
        max_grad_norm=job["clip_norm"],
        optim="adamw_torch",
        disable_dropout=True,
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
    words = Tokenizer(
        models.WordLevel({chr(0x100 + n): n for n in range(256)}, unk_token=chr(0x100))
    )
    count = rows // group * len(job["rollouts"])
    table = pyarrow.Table.from_pylist([{"prompt": "a"} for _ in range(count)])
    trainer = Recorded(
        model=model,
        reward_funcs=reward,
        args=arguments,
        train_dataset=datasets.Dataset(datasets.table.InMemoryTable(table), fingerprint="rows"),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=words, pad_token=chr(0x100), eos_token=chr(0x104)
        ),
        rollout_func=recorded,
    )
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    curve = {
        "loss": trainer.curve,
        "grad_norm": [entry["grad_norm"] for entry in logged],
        "reward": [entry["reward"] for entry in logged],
    }
    last = model.get_output_embeddings().weight.detach()
    curve["head_norm"] = float(last.double().norm())
    (folder / "trl.json").write_text(json.dumps(curve))
    print({name: curve[name][-3:] for name in ("loss", "grad_norm", "reward")})


if __name__ == "__main__":
    main()

"""Writes the golden curves of SFT and DPO with TRL 1.16, once, by hand.

    PYTHONPATH=REFERENCES python -m tests.workers.training.trl.curves

REFERENCES holds trl 1.16, which the tests do not need. Both sides get the same initial weights, the
same token ids in the same order, fp32, no dropout, AdamW at a constant rate and clipping at 1; TRL
has two micro-batches per step. TRL's own preparation of data is left out: rows are token ids.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tests.workers.training.conftest import TINY
from workers.training.data.rows import Row, Segment

GOLDEN = Path(__file__).parent / "curves.json"
STEPS, BATCH, LENGTH, RATE = 50, 4, 32, 1e-3
CASES: dict[str, dict[str, Any]] = {
    "sft": {"objective": "sft", "sft": {"packing": False}},
    "dpo": {"objective": "dpo", "dpo": {"loss": "dpo", "beta": 0.1}},
    "hinge": {"objective": "dpo", "dpo": {"loss": "hinge", "beta": 0.1}},
    "ipo": {"objective": "dpo", "dpo": {"loss": "ipo", "beta": 0.1}},
}
_TRL_LOSSES = {"dpo": "sigmoid", "hinge": "hinge", "ipo": "ipo"}


def examples() -> list[tuple[list[int], list[int], list[int]]]:
    """Prompt, answer and a worse answer, token ids; enough for every step without repetition."""
    generator = np.random.default_rng(17)

    def ids(low: int, high: int) -> list[int]:
        # few ids, so that there is something to learn
        return [int(each) for each in generator.integers(1, 40, int(generator.integers(low, high)))]

    return [(ids(3, 8), ids(3, 9), ids(3, 9)) for _ in range(STEPS * BATCH)]


def rows(case: str) -> list[Row]:
    """The examples as rows of the engine: one each."""
    return [
        _row([prompt + answer, prompt + worse] if case != "sft" else [prompt + answer], len(prompt))
        for prompt, answer, worse in examples()
    ]


def _row(documents: list[list[int]], prompt: int) -> Row:
    length = LENGTH if len(documents) > 1 else LENGTH // 2
    ids, weights = np.zeros(length + 1, np.int64), np.zeros(length, np.float32)
    starts, segments, at = [], [], 0
    for role, tokens in zip(("chosen", "rejected"), documents, strict=False):
        stop = at + len(tokens)
        ids[at:stop] = tokens
        weights[at + prompt - 1 : stop - 1] = 1.0
        starts.append(at)
        if len(documents) > 1:
            segments.append(Segment(at, stop, 0, role))  # type: ignore[arg-type]
        at = stop
    return Row(ids, weights, (*starts, at), tuple(segments))


def spec(case: str, steps: int) -> dict[str, Any]:
    """The engine's run of a case."""
    optimizer = {"name": "adamw", "lr": RATE, "betas": [0.9, 0.999], "eps": 1e-8}
    return {
        "kind": "train",
        "model": TINY,
        "plan": {"micro_batch_size": BATCH // 2, "global_batch_size": BATCH},
        "train": {
            "steps": steps,
            "seq_len": LENGTH if case != "sft" else LENGTH // 2,
            "seed": 3,
            "optimizer": {**optimizer, "weight_decay": 0.0},
            "clip_norm": 1.0,
            "samples": {"count": 0},
            **CASES[case],
        },
    }


def main() -> None:
    """Write the curves."""
    curves: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            curves[case] = _trl_curve(case, Path(folder) / case)
    GOLDEN.write_text(json.dumps(curves, indent=1) + "\n", encoding="utf-8")


def _trl_curve(case: str, folder: Path) -> dict[str, list[float]]:
    import datasets
    import pyarrow
    import torch
    import trl
    from transformers import AutoModelForCausalLM

    from tests.bench.bench_speed import InitialWeights
    from workers.contracts.specs.model import ModelSpec
    from workers.models.hf.saving import save_hugging_face

    torch.set_num_threads(1)
    folder.mkdir()
    save_hugging_face(InitialWeights(ModelSpec.from_dict(TINY), seed=3), folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    shared: dict[str, Any] = {
        "output_dir": str(folder / "out"),
        "max_steps": STEPS,
        "per_device_train_batch_size": BATCH // 2,
        "gradient_accumulation_steps": 2,
        "gradient_checkpointing": False,
        "train_sampling_strategy": "sequential",
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "dataloader_pin_memory": False,
        "remove_unused_columns": False,
        "max_length": None,
    }
    kind = trl.SFTTrainer if case == "sft" else trl.DPOTrainer

    class Prepared(kind):  # type: ignore[misc, valid-type]
        def _prepare_dataset(self, dataset: Any, *args: Any, **more: Any) -> Any:
            return dataset

    if case == "sft":
        data = [
            {"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer}
            for prompt, answer, _ in examples()
        ]
        arguments = trl.SFTConfig(**shared, packing=False)
    else:
        data = [
            {"prompt_ids": prompt, "chosen_ids": answer, "rejected_ids": worse}
            for prompt, answer, worse in examples()
        ]
        options = CASES[case]["dpo"]
        arguments = trl.DPOConfig(**shared, loss_type=[_TRL_LOSSES[case]], beta=options["beta"])
    trainer = Prepared(
        model=model,
        args=arguments,
        train_dataset=datasets.Dataset(
            datasets.table.InMemoryTable(pyarrow.Table.from_pylist(data)), fingerprint=case
        ),
        processing_class=_tokenizer(folder),
    )
    trainer.train()
    names = {"loss": "loss", "grad_norm": "grad_norm"}
    if case != "sft":
        names |= {"dpo/margin": "rewards/margins", "dpo/accuracy": "rewards/accuracies"}
    log = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return {
        ours: [round(float(entry[theirs]), 7) for entry in log] for ours, theirs in names.items()
    }


def _tokenizer(folder: Path) -> Any:
    """A tokenizer that TRL asks for its padding token, and never to encode."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"t{number}": number for number in range(TINY["vocab"])}
    plain = Tokenizer(models.WordLevel(words, unk_token="t0"))
    return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="t0", eos_token="t255")


if __name__ == "__main__":
    main()

"""Initial specs of fine-tuning runs for the new-run form: SmolLM2 on the example files.

They work once the weights are fetched; other weights and files are chosen in the form.
"""

from __future__ import annotations

from typing import Any, Final

from django.utils.translation import gettext_noop as _

from webui.forms.spec_fields import SMOLLM2

_WEIGHTS: Final = {"package": SMOLLM2}
# begins with random weights and reads text with the teacher's tokenizer
_STUDENT: Final = {
    "name": "smollm2-student-11m",
    "layers": 4,
    "hidden": 192,
    "heads": 3,
    "kv_heads": 3,
    "ffn": 512,
    "vocab": 49152,
    "max_seq_len": 8192,
    "tie_embeddings": True,
}


def _spec(objective: str, file: str, format: str, **train: Any) -> dict[str, Any]:
    """A fine-tuning run of a few minutes on a CPU; a student starts from random weights."""
    return {
        "kind": "train",
        "data": {"path": f"examples/{file}", "format": format},
        "plan": {"precision": "fp32", "micro_batch_size": 2, "global_batch_size": 4},
        "train": {
            "objective": objective,
            **({} if objective == "distill" else {"init_from": _WEIGHTS}),
            "steps": 20,
            "seq_len": 256,
            "optimizer": {"lr": 2e-5},
            "lr_schedule": {"name": "cosine", "warmup_steps": 2},
            "eval": {"every_steps": 10},
            "checkpoint": {"every_steps": 20},
            "clip_norm": 1.0,
            **train,
        },
    }


# of name: (title, spec)
FINETUNING_EXAMPLES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "sft": (
        _("Fine-tune on conversations"),
        _spec(
            "sft", "chats.jsonl", "messages", evaluate={"metrics": ["loss", "perplexity", "rougeL"]}
        ),
    ),
    "lora": (
        _("LoRA"),
        _spec(
            "sft",
            "chats.jsonl",
            "messages",
            adapter={"method": "lora", "rank": 16},
            optimizer={"lr": 2e-4},
            evaluate={"metrics": ["loss", "perplexity", "rougeL"]},
        ),
    ),
    "qlora": (
        _("QLoRA"),
        _spec(
            "sft",
            "chats.jsonl",
            "messages",
            adapter={"method": "qlora", "rank": 16},
            optimizer={"lr": 2e-4},
            evaluate={"metrics": ["loss", "perplexity", "rougeL"]},
        ),
    ),
    "dpo": (
        _("DPO on preferences"),
        _spec(
            "dpo",
            "preferences.jsonl",
            "preference",
            optimizer={"lr": 5e-6},
            evaluate={"metrics": ["accuracy"]},
        ),
    ),
    "reward": (
        _("Reward model"),
        _spec("reward", "preferences.jsonl", "preference", optimizer={"lr": 1e-5}),
    ),
    "distill": (
        _("Distillation of SmolLM2 into an 11M student"),
        {
            "model": _STUDENT,
            **_spec(
                "distill",
                "chats.jsonl",
                "messages",
                distill={"teacher": _WEIGHTS},
                steps=60,
                optimizer={"lr": 2e-3},
            ),
        },
    ),
}

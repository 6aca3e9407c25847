"""A Hugging Face `TrainerCallback`: `Trainer(..., callbacks=[OrreryCallback(url, token, name)])`.

Maps the Trainer's metric names to Orrery's.
"""

from __future__ import annotations

import math
import time
from typing import Any

from transformers import TrainerCallback

try:
    from workers.recorder import orrery_recorder
except ImportError:  # installed alone
    import orrery_recorder  # type: ignore[no-redef]

_NAMES = {"loss": "loss", "eval_loss": "val_loss", "learning_rate": "lr", "grad_norm": "grad_norm"}


# decoders of the Llama shape, with their differences
_SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"bias": "qkv"},
    "qwen3": {"qk_norm": True},
}


def _shape(config: Any) -> dict[str, Any]:
    """`{"model": ModelSpec}` of a Hugging Face configuration of the Llama shape, else empty."""
    family = getattr(config, "model_type", "")
    if family not in _SHAPES:
        return {}
    heads = config.num_attention_heads
    sizes = {
        "name": family,
        "layers": config.num_hidden_layers,
        "hidden": config.hidden_size,
        "heads": heads,
        "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "ffn": config.intermediate_size,
        "vocab": config.vocab_size,
        "max_seq_len": config.max_position_embeddings,
        "tie_embeddings": bool(getattr(config, "tie_word_embeddings", False)),
        "norm_eps": config.rms_norm_eps,
    }
    return {"model": {**sizes, **_SHAPES[family]}}


def _config(args: Any, model: Any) -> dict[str, Any]:
    """The TrainingArguments without secrets, and the model's configuration as `model`."""
    values = args.to_sanitized_dict() if hasattr(args, "to_sanitized_dict") else {}
    config = {name: value for name, value in values.items() if not name.endswith("_token")}
    own = getattr(model, "config", None)
    if own is not None and hasattr(own, "to_dict"):
        labels = ("id2label", "label2id")  # a value per class: thousands of a large model
        config["model"] = {
            name: value for name, value in own.to_dict().items() if name not in labels
        }
    return config


class OrreryCallback(TrainerCallback):  # type: ignore[misc]  # mypy does not read transformers
    """Records what the Trainer logs, on its first process only.

    Arguments are those of `orrery_recorder.init`.
    """

    def __init__(
        self, url: str | None = None, token: str | None = None, name: str = "", **more: Any
    ) -> None:
        self._arguments = {"url": url, "token": token, "name": name, **more}
        self.run: orrery_recorder.Run | None = None
        self._began, self._steps_s, self._steps = 0.0, 0.0, 0

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        """Create the run."""
        if not state.is_world_process_zero or self.run is not None:
            return
        kind = type(model).__name__ if model is not None else "model"
        count = (
            sum(parameter.numel() for parameter in model.parameters()) if model is not None else 0
        )
        spec: dict[str, Any] = {"tags": ["transformers"], **_shape(getattr(model, "config", None))}
        spec["notes"] = f"{kind}, {count:,} parameters, {state.max_steps} steps"
        name = self._arguments["name"] or getattr(args, "run_name", None) or kind
        arguments = {**self._arguments, "name": name}
        arguments["spec"] = {**spec, **(arguments.get("spec") or {})}
        arguments["config"] = {**_config(args, model), **(arguments.get("config") or {})}
        self.run = orrery_recorder.init(**arguments, rank=0)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start the step's timer."""
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Add the step's time."""
        self._steps_s += time.perf_counter() - self._began
        self._steps += 1

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        """Log the Trainer's numbers."""
        if self.run is None:
            return
        values = {}
        for name, value in (logs or {}).items():
            if isinstance(value, (int, float)) and name not in ("epoch", "step"):
                values[_NAMES.get(name, f"hf/{name}")] = float(value)
        if "val_loss" in values:
            values["val_perplexity"] = math.exp(min(values["val_loss"], 700.0))
        if "loss" in values and self._steps:
            values["step_time_s"] = self._steps_s / self._steps
            self._steps_s, self._steps = 0.0, 0
        if values:
            self.run.log(
                values,
                step=state.global_step,
                tokens=int(getattr(state, "num_input_tokens_seen", 0) or 0),
            )

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Record the saved checkpoint."""
        if self.run is not None:
            path = f"{args.output_dir}/checkpoint-{state.global_step}"
            self.run.event("checkpoint_saved", {"step": state.global_step, "path": path})

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Finish the run."""
        if self.run is not None:
            self.run.finish()
            self.run = None

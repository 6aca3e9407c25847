"""What a rank says on its standard output: a line at the start, at some steps, and at the end.
Knows no file.

The numbers are global, so that all ranks say the same lines and a log page folds them into one.
"""

from __future__ import annotations

from collections.abc import Mapping

EVERY = 50  # steps between lines, besides validations


def started(*, model: str, first: int, steps: int, tokens_per_step: int, ranks: int) -> None:
    begin = f"going on after step {first} of {steps}" if first else f"{steps} steps"
    _say(
        f"training {model} on {ranks} rank{'s' if ranks > 1 else ''}: {begin}, "
        f"{tokens_per_step:,} tokens a step"
    )


def stepped(step: int, steps: int, values: Mapping[str, float]) -> None:
    """Says a step's numbers at step 1, at each 50th, at validations and at the last."""
    if step not in (1, steps) and step % EVERY and "val_loss" not in values:
        return
    line = (
        f"step {step}/{steps}  loss {values['loss']:.4f}  grad_norm {values['grad_norm']:.3f}  "
        f"lr {values['lr']:.3g}"
    )
    if "val_loss" in values:
        line += f"  val_loss {values['val_loss']:.4f}"
    if "tokens_per_s" in values:
        line += f"  {values['tokens_per_s']:,.0f} tokens/s"
    if "mfu" in values:
        line += f"  mfu {values['mfu']:.1%}"
    _say(line)


def ended(reason: str) -> None:
    _say(reason)


def _say(text: str) -> None:
    print(text, flush=True)

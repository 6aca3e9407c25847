"""Lines of a rank on its standard output: at the start, at some steps and at the end.

The numbers are global: all ranks print the same lines, and a log page groups them into one.
"""

from __future__ import annotations

from collections.abc import Mapping

EVERY = 50  # steps between lines, in addition to validations


def started(*, model: str, first: int, steps: int, tokens_per_step: int, ranks: int) -> None:
    """Print the start line."""
    begin = f"continuing after step {first} of {steps}" if first else f"{steps} steps"
    _print(
        f"training {model} on {ranks} rank{'s' if ranks > 1 else ''}: {begin}, "
        f"{tokens_per_step:,} tokens per step"
    )


def stepped(step: int, steps: int, values: Mapping[str, float]) -> None:
    """Print a step's numbers at step 1, every 50th, at validations and at the last."""
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
    _print(line)


def ended(reason: str) -> None:
    """Print why training ended."""
    _print(reason)


def _print(text: str) -> None:
    print(text, flush=True)

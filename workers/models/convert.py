"""The command `python -m workers.models.convert IN OUT [--to hf|orrery]`: weights from one form into another.

IN is a Hugging Face folder, a checkpoint (or a run's folder of them) or a .gguf file; OUT is a folder that does not
exist yet. It appears when it is whole, or not at all.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from workers.models.checkpoint import CheckpointFolder, save_checkpoint
from workers.models.errors import WeightsError
from workers.models.hf.saving import save_hugging_face
from workers.models.source import open_weights

Form = Literal["hf", "orrery"]
# what a tokenizer consists of, and what generation starts from: carried along unread
_BESIDE = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, or 64 after a sentence on what is wrong."""
    parser = argparse.ArgumentParser(prog="workers.models.convert", description="Weights from one form into another.")
    parser.add_argument("source", metavar="IN", type=Path, help="Hugging Face folder, checkpoint or .gguf file")
    parser.add_argument("target", metavar="OUT", type=Path, help="a folder that does not exist yet")
    parser.add_argument("--to", choices=("hf", "orrery"), help="default: hf from a checkpoint of ours, else orrery")
    options = parser.parse_args(argv)
    try:
        form = convert(options.source, options.target, options.to)
    except (WeightsError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 64
    print(f"{options.target}: written as {'Hugging Face folder' if form == 'hf' else 'checkpoint'}")
    return 0


def convert(source: Path, target: Path, to: Form | None = None) -> Form:
    """Returns the form written. Raises WeightsError and OSError; then nothing is left behind."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise WeightsError(f"{target} exists; give a folder that does not")
    weights = open_weights(source)
    form: Form = to or ("hf" if isinstance(weights, CheckpointFolder) else "orrery")
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        if form == "hf":
            save_hugging_face(weights, beside)
        else:
            save_checkpoint(weights, beside)
        _carry_along(source, beside)
        beside.chmod(0o755)  # mkdtemp keeps to the owner
        beside.replace(target)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    return form


def _carry_along(source: Path, target: Path) -> None:
    folder = source if source.is_dir() else source.parent
    if source.suffix == ".gguf":
        return
    for name in _BESIDE:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, target / name)


if __name__ == "__main__":
    sys.exit(main())

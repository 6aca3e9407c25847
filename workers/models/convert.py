"""The command `python -m workers.models.convert IN OUT [--to hf|orrery]`: weights from one form into another.

IN is a Hugging Face folder, a checkpoint (or a run's folder of them), a .gguf file or a fetched
model's folder; OUT is
a folder that does not exist yet. It appears when it is whole, or not at all, tokenizer and
generation settings with it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from workers.models.errors import WeightsError
from workers.models.hf.saving import save_hugging_face
from workers.models.text.assets import GENERATION, TOKENIZER, belongings, keep
from workers.models.weights.open import open_weights
from workers.models.weights.orrery_checkpoint import CheckpointFolder, save_checkpoint

Form = Literal["hf", "orrery"]


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, or 64 after a sentence on what is wrong."""
    parser = argparse.ArgumentParser(
        prog="workers.models.convert", description="Weights from one form into another."
    )
    parser.add_argument(
        "source", metavar="IN", type=Path, help="Hugging Face folder, checkpoint or .gguf file"
    )
    parser.add_argument("target", metavar="OUT", type=Path, help="a folder that does not exist yet")
    parser.add_argument(
        "--to", choices=("hf", "orrery"), help="default: hf from a checkpoint of ours, else orrery"
    )
    options = parser.parse_args(argv)
    try:
        form = convert(options.source, options.target, options.to)
    except (WeightsError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 64
    tokenizer = "its tokenizer" if (options.target / TOKENIZER).is_file() else f"no {TOKENIZER}"
    print(
        f"{options.target}: written as {'Hugging Face folder' if form == 'hf' else 'checkpoint'}, "
        f"with {tokenizer}"
    )
    return 0


def convert(source: Path, target: Path, to: Form | None = None) -> Form:
    """Returns the form written. Raises WeightsError and OSError; then nothing is left behind."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise WeightsError(f"{target} exists; give a folder that does not")
    weights, files = open_weights(source), _belongings(source)
    form: Form = to or ("hf" if isinstance(weights, CheckpointFolder) else "orrery")
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        if form == "hf":
            save_hugging_face(weights, beside)
        else:
            save_checkpoint(weights, beside)
        keep(files, beside)
        if form == "hf" and GENERATION in files:
            _name_ends(beside, files[GENERATION])
        beside.chmod(0o755)  # mkdtemp keeps to the owner
        beside.replace(target)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    return form


def _belongings(source: Path) -> dict[str, bytes]:
    """Tokenizer and generation settings; a tokenizer of a kind not known here is told, and the
    weights go without.
    """
    try:
        return belongings(source)
    except WeightsError as error:
        print(f"written without a tokenizer: {error}", file=sys.stderr)
        return {}


def _name_ends(folder: Path, generation: bytes) -> None:
    """Where a text begins and ends, by id, in config.json too: what reads no generation_config.json
    looks there.
    """
    told = json.loads(generation)
    path = folder / "config.json"
    config = json.loads(path.read_bytes())
    found = {
        name: told[name]
        for name in ("bos_token_id", "eos_token_id", "pad_token_id")
        if name in told
    }
    path.write_text(json.dumps({**config, **found}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())

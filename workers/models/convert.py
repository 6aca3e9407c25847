"""The command `python -m workers.models.convert IN OUT [--to hf|orrery]`: converts weights.

IN is a Hugging Face folder, a checkpoint (or a run's folder of them), a .gguf file, a fetched
model's folder or an adapter's, which is merged into its base; OUT is a folder that does not exist
yet. OUT appears only when it is complete, including tokenizer and generation settings.
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

from workers.models.adapters.merged import MergedWeights
from workers.models.errors import WeightsError
from workers.models.hf.saving import save_hugging_face
from workers.models.text.assets import GENERATION, TOKENIZER, read_assets, write_files
from workers.models.weights.open import open_weights
from workers.models.weights.orrery_checkpoint import CheckpointFolder, save_checkpoint

MERGE = "merge.json"  # in a folder of merged weights: the adapter, its base, the error
Form = Literal["hf", "orrery"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns 0, or 64 after an error message."""
    parser = argparse.ArgumentParser(
        prog="workers.models.convert", description="Convert weights between formats."
    )
    parser.add_argument(
        "source", metavar="IN", type=Path, help="Hugging Face folder, checkpoint or .gguf file"
    )
    parser.add_argument("target", metavar="OUT", type=Path, help="a folder that does not exist yet")
    parser.add_argument(
        "--to", choices=("hf", "orrery"), help="default: hf from an Orrery checkpoint, else orrery"
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
    """Returns the format written. Raises WeightsError and OSError, leaving no files."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise WeightsError(f"{target} exists; give a folder that does not")
    weights, files = open_weights(source), _read_assets(source)
    if isinstance(weights, MergedWeights):
        files = files or _read_assets(Path(weights.base.where))
    form: Form = to or ("hf" if isinstance(weights, CheckpointFolder) else "orrery")
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        if form == "hf":
            save_hugging_face(weights, staging)
        else:
            save_checkpoint(weights, staging)
        write_files(files, staging)
        if isinstance(weights, MergedWeights):
            _report_merge(weights, staging)
        if form == "hf" and GENERATION in files:
            _copy_token_ids(staging, files[GENERATION])
        staging.chmod(0o755)  # mkdtemp allows the owner only
        staging.replace(target)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return form


def _report_merge(weights: MergedWeights, folder: Path) -> None:
    """Record what was merged, and the error of storing it in the base's type."""
    error = weights.error()
    record = {**weights.describe(), **error.to_dict()}
    (folder / MERGE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    logits = "" if error.logits is None else f", logits by at most {error.logits:.2g}"
    print(
        f"merged {weights.adapter.where} into {weights.base.where}: rounding changes the merged "
        f"part by {error.relative:.2g} of the adapter's change{logits}"
    )


def _read_assets(source: Path) -> dict[str, bytes]:
    """Tokenizer and generation settings; none, with a warning, for an unknown kind of tokenizer."""
    try:
        return read_assets(source)
    except WeightsError as error:
        print(f"written without a tokenizer: {error}", file=sys.stderr)
        return {}


def _copy_token_ids(folder: Path, generation: bytes) -> None:
    """Copy the ids of start, end and padding tokens to config.json, which some programs read."""
    settings = json.loads(generation)
    path = folder / "config.json"
    config = json.loads(path.read_bytes())
    ids = {
        name: settings[name]
        for name in ("bos_token_id", "eos_token_id", "pad_token_id")
        if name in settings
    }
    path.write_text(json.dumps({**config, **ids}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())

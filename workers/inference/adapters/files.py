"""Reads an adapter's files for serving, and refuses those that cannot run next to others.

Does not depend on slots or ranks.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from workers.contracts.catalog.adapter_shapes import block_linears
from workers.contracts.specs.model import ModelSource, ModelSpec
from workers.inference.adapters.adapter import Adapter
from workers.models.adapters.peft_config import TENSORS, read_config
from workers.models.adapters.peft_files import (
    AdapterWeights,
    check_base,
    fingerprint,
    is_adapter,
    read_adapter,
)
from workers.models.errors import WeightsError
from workers.models.weights.locations import locate_weights
from workers.models.weights.open import open_weights


def read_for_serving(
    name: str, path: str, *, model: ModelSpec, base: Path | None, rank: int
) -> Adapter:
    """The adapter at `path` (of a run's checkpoints the newest), with its factors.

    `base` are the served weights, `rank` the largest that slots hold. Raises WeightsError for
    files that cannot be read, another base, or an adapter that slots cannot hold.
    """
    folder = locate_weights(ModelSource(path=path))
    if not is_adapter(folder):
        what = "is not a folder with" if folder.exists() else "does not exist; give a folder with"
        raise WeightsError(f"{path} {what} adapter_config.json and adapter_model.safetensors")
    digest = file_digest(folder)
    weights = read_adapter(folder, model)
    largest = _check(weights, model, rank)
    _check_base(weights, base)
    return Adapter(
        name, folder, largest, digest, dict(weights.low_rank), quantized=weights.quantized
    )


def read_again(adapter: Adapter, model: ModelSpec) -> None:
    """Read the factors of an adapter back into host memory.

    Raises WeightsError if its files changed since it was loaded.
    """
    if file_digest(adapter.folder) != adapter.digest:
        raise WeightsError(
            f"the files of adapter {adapter.name} changed since it was loaded; unload it and load "
            "it again"
        )
    adapter.updates = dict(read_adapter(adapter.folder, model).low_rank)


def configured_rank(path: str) -> int:
    """The largest rank that an adapter's configuration names. Raises WeightsError."""
    config = read_config(locate_weights(ModelSource(path=path)))
    ranks = [config.get("r"), *(config.get("rank_pattern") or {}).values()]
    return max((rank for rank in ranks if isinstance(rank, int)), default=1)


def file_digest(folder: Path) -> str:
    """A digest of the adapter's tensors. Raises WeightsError."""
    try:
        with open(folder / TENSORS, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise WeightsError(f"{folder / TENSORS} cannot be read: {error.strerror}") from None


def _check(weights: AdapterWeights, model: ModelSpec, rank: int) -> int:
    """The adapter's largest rank."""
    alone = (
        "serve it alone, as the model's path"
        if weights.mergeable
        else "this server cannot compute it"
    )
    if weights.kind != "LORA":
        raise WeightsError(
            f"{weights.where} is {weights.kind}; only LoRA adapters are served next to others: "
            f"{alone}"
        )
    if weights.tensors:
        raise WeightsError(
            f"{weights.where} has {min(weights.tensors)} in full; only low-rank updates are served "
            f"next to others: {alone}"
        )
    if any(update.magnitude is not None for update in weights.low_rank.values()):
        raise WeightsError(
            f"{weights.where} is DoRA, whose norms depend on the whole weight; {alone}"
        )
    if not weights.low_rank:
        raise WeightsError(f"{weights.where} has no low-rank update")
    for name in weights.low_rank:
        _, layer, module = name.split(".", 2) if name.startswith("blocks.") else ("", "0", name)
        if module not in block_linears(model, int(layer)):
            raise WeightsError(f"{weights.where} adapts {name}; linears of layers only: {alone}")
        if module == "attn.kv_up":
            raise WeightsError(
                f"{weights.where} adapts {name}, which latent attention absorbs into queries; "
                f"{alone}"
            )
    largest = max(update.a.shape[0] for update in weights.low_rank.values())
    if largest > rank:
        raise WeightsError(
            f"{weights.where} has rank {largest}, this server holds at most {rank}; set "
            f"serve.adapter_rank {largest} or more"
        )
    return largest


def _check_base(weights: AdapterWeights, base: Path | None) -> None:
    """By the fingerprint of the adapter's base, if it says one or its base is on this machine."""
    if base is None:
        return
    served = open_weights(base)
    if getattr(served, "quantization", None) is not None:
        return  # rounded weights have no fingerprint in common with those trained on
    if weights.fingerprint is not None:
        check_base(weights, served)
        return
    named = Path(weights.base) if weights.base else None
    if named is None or not named.is_absolute() or not named.exists():
        return
    if fingerprint(open_weights(named)) != fingerprint(served):
        raise WeightsError(
            f"{weights.where} was trained over {weights.base}, the weights of {served.where} "
            "differ; give the adapter's own base"
        )

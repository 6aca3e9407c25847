"""Tokens/s of a batch of 64 with 16 adapters of rank 8, compared with its base alone; fp32.

Both engines have the same weights and take turns step by step, so that other load on the machine
reaches both alike; CPU seconds count. Adapters are on all linear layers.
"""

from __future__ import annotations

import os

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as the command does

import copy
import random
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from tests.bench.record import record
from workers.contracts.catalog.adapter_shapes import low_rank_linears
from workers.contracts.specs.finetuning.adapters import AdapterSpec
from workers.contracts.specs.model import ModelSpec
from workers.inference.adapters.adapter import Adapter
from workers.inference.adapters.low_rank_slots import SlotSpec
from workers.inference.engine import Engine
from workers.inference.engine_builder import build_engine
from workers.inference.model_loading import LoadedModel, load_model
from workers.inference.sampling.parameters import SamplingParams
from workers.inference.scheduling.policy import Limits
from workers.models.adapters.peft_files import LowRank

THREADS = int(os.environ.get("OMP_NUM_THREADS") or 2)
ADAPTERS, RANK, BATCH = 16, 8, 64
STEPS, WARM, ROUNDS = 14, 2, 3
# two layers of Llama 3.2 1B with a smaller vocabulary
WIDE = {"name": "llama3.2-1b-layers", "layers": 2, "hidden": 2048, "heads": 32, "kv_heads": 8}
MODELS: dict[str, str | ModelSpec] = {
    "wide": ModelSpec.from_dict({**WIDE, "ffn": 8192, "vocab": 16384, "max_seq_len": 1024}),
    "small": "smollm2-135m",
}


def main(selected: list[str]) -> int:
    torch.set_num_threads(THREADS)
    for name in selected or MODELS:
        loaded = load_model(MODELS[name], precision="fp32", device=torch.device("cpu"))
        for spread in ("even", "uneven"):
            compare(loaded, spread)
    return 0


def compare(loaded: LoadedModel, spread: str) -> None:
    base = engine_of(copy_of(loaded), slots=0)
    adapted = engine_of(copy_of(loaded), slots=ADAPTERS)
    for number in range(ADAPTERS):
        add_adapter(adapted, f"a{number}", AdapterSpec(rank=RANK), number)
    shares = []
    for turn in range(ROUNDS):
        fill(base, "base", turn)
        fill(adapted, spread, turn)
        seconds = {base: 0.0, adapted: 0.0}
        for step in range(STEPS):
            for engine in (base, adapted) if step % 2 else (adapted, base):
                began = time.process_time()
                assert len(engine.step()) == BATCH
                if step >= WARM:
                    seconds[engine] += time.process_time() - began
        for engine in seconds:
            for request in list(engine.scheduler.running):
                engine.abort(request)
        shares.append(seconds[base] / seconds[adapted])
    record(
        "inference",
        what=f"tokens/s of {BATCH} requests with {ADAPTERS} adapters of rank {RANK}, {spread}ly "
        "used, compared with the base alone",
        value=statistics.median(shares),
        unit="share",
        figure=">= 0.9",
        shares=[round(each, 3) for each in shares],
        model=loaded.spec.name,
        threads=THREADS,
    )


def copy_of(loaded: LoadedModel) -> LoadedModel:
    """The same weights in modules of their own."""
    tensors = [*loaded.decoder.parameters(), *loaded.decoder.buffers()]
    decoder = copy.deepcopy(loaded.decoder, {id(tensor): tensor for tensor in tensors})
    return replace(loaded, decoder=decoder)


def engine_of(loaded: LoadedModel, *, slots: int) -> Engine:
    if slots:
        loaded = replace(loaded, adapter_slots=SlotSpec(slots, RANK))
    limits = Limits(step_tokens=2048, sequences=BATCH)
    return build_engine(loaded, blocks=BATCH * 8, limits=limits)


def add_adapter(engine: Engine, name: str, spec: AdapterSpec, seed: int) -> None:
    model: ModelSpec = engine.runner.decoder.spec
    generator = torch.Generator().manual_seed(seed)
    updates = {
        f"blocks.{layer}.{linear}": LowRank(
            torch.randn(RANK, inputs, generator=generator) * 0.02,
            torch.randn(outputs, RANK, generator=generator) * 0.02,
            spec.scale,
        )
        for layer in range(model.layers)
        for linear, (outputs, inputs) in low_rank_linears(model, spec, layer).items()
    }
    store = engine.adapters
    assert store is not None
    store.add(Adapter(name, Path(name), RANK, "", updates))


def fill(engine: Engine, spread: str, turn: int) -> None:
    """Requests for a full batch: each adapter equally often, drawn at random, or none."""
    draw = random.Random(turn)
    params = SamplingParams(max_new_tokens=STEPS + 8, temperature=0, ignore_eos=True)
    for number in range(BATCH):
        adapter = None
        if engine.adapters is not None:
            place = number % ADAPTERS if spread == "even" else draw.randrange(ADAPTERS)
            adapter = engine.adapters.by_name[f"a{place}"]
        prompt = [(7 + turn * 131 + number * 31 + place * 17) % 4096 for place in range(16)]
        engine.add(prompt, params, adapter=adapter)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Decoding with drafts beside the same engine without: tokens a second of one request and of four,
fp32, in turns.

A deep model whose later layers change little, and its first layers as the draft; a text looked up
in itself by a real
model, where its weights are there. Greedy, and the answers compared.
"""

from __future__ import annotations

import os

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as the command does

import copy
import statistics
import sys
import time
from collections.abc import Callable

import torch

from tests.bench.record import record
from workers.contracts.specs.model import ModelSource, ModelSpec
from workers.contracts.specs.run_bodies import SpeculateSpec
from workers.inference.engine import Engine
from workers.inference.engine_builder import build_engine, count_available_blocks
from workers.inference.model_loading import LoadedModel, load_model
from workers.inference.sampling.parameters import SamplingParams
from workers.inference.scheduling.policy import Limits
from workers.inference.speculate.setup import Drafting
from workers.models.decoder import Decoder
from workers.models.initialise import initialise
from workers.models.weights.locations import models_home

THREADS = int(os.environ.get("OMP_NUM_THREADS") or 2)
ROUNDS, NEW = 3, 96
FOLDER = "smollm2-135m-instruct"
DEEP = ModelSpec.from_dict(
    {
        "name": "deep",
        "layers": 24,
        "hidden": 768,
        "heads": 12,
        "kv_heads": 4,
        "ffn": 2048,
        "vocab": 8192,
        "max_seq_len": 1024,
        "tie_embeddings": False,
    }
)
NAMES = ("d", "deep", "size", "far")
TEXT = """def area(width, height):
    return width * height


def volume(width, height, depth):
    return area(width, height) * depth
"""
EARLY, FAINT = 2, 0.012
"""Layers of the draft, and what is left of the later layers' part in the residual stream."""


def main(wanted: list[str]) -> int:
    torch.set_num_threads(THREADS)
    parts: dict[str, Callable[[], None]] = {"layers": layers, "lookup": lookup}
    for name in wanted or parts:
        parts[name]()
    return 0


def layers() -> None:
    target = deep()
    draft = Decoder(replace_layers(DEEP, EARLY))
    kept = dict(target.named_parameters())
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            parameter.copy_(kept[name])
    drafting = Drafting(SpeculateSpec(tokens=6), LoadedModel(draft.requires_grad_(False), None, ()))
    plain = engine(LoadedModel(copy.deepcopy(target), None, ()), None)
    speculating = engine(LoadedModel(target, None, ()), drafting)
    for count in (1, 4):
        prompts = [
            [
                [(7 + turn * 131 + number * 31 + place * 17) % 8192 for place in range(24)]
                for number in range(count)
            ]
            for turn in range(ROUNDS + 1)
        ]
        what = f"of {count} at a time with a draft of {EARLY} of {DEEP.layers} layers"
        compare(plain, speculating, prompts, what=what)


def lookup() -> None:
    path = models_home() / FOLDER
    if not path.exists():
        print(f"{path} is not there; fetch it: python -m workers.models.fetch")
        return
    pair = [
        load_model(ModelSource(path=str(path)), precision="fp32", device=torch.device("cpu"))
        for _ in range(2)
    ]
    words = pair[0].words
    assert words is not None
    tasks = [
        f"Repeat this code, with the name {name} in place of depth.\n\n{TEXT}" for name in NAMES
    ]
    prompts = [
        [words.encode(words.chat([{"role": "user", "content": task}]), special=False)]
        for task in tasks
    ]
    drafting = Drafting(SpeculateSpec(ngram=3, tokens=8), None)
    what = "of one request that repeats its prompt, looked up"
    compare(engine(pair[0], None), engine(pair[1], drafting), prompts, what=what)


def compare(
    plain: Engine, speculating: Engine, prompts: list[list[list[int]]], *, what: str
) -> None:
    """The first turn is not timed: it warms up, and lengths find themselves."""
    ratios, speeds, equal, counted = [], [], 0, []
    for turn, given in enumerate(prompts):
        before = copy.copy(speculating.counts)
        plain_s, wanted = answered(plain, given)
        ours_s, found = answered(speculating, given)
        equal += sum(one == other for one, other in zip(wanted, found, strict=True))
        counts = speculating.counts
        if turn:
            ratios.append(plain_s / ours_s)
            speeds.append(sum(map(len, found)) / ours_s)
            names = ("accepted", "drafted", "decodes")
            counted.append([getattr(counts, name) - getattr(before, name) for name in names])
    accepted, drafted, decodes = (sum(each) for each in zip(*counted, strict=True))
    record(
        "inference",
        what=f"tokens/s {what}, beside no draft",
        value=statistics.median(ratios),
        unit="times",
        figure=">= 1.4",
        ratios=[round(each, 2) for each in ratios],
        tokens_per_s=round(statistics.median(speeds), 1),
        acceptance=round(accepted / max(1, drafted), 3),
        accepted_per_step=round(accepted / max(1, decodes), 2),
        answers_equal=f"{equal} of {sum(map(len, prompts))}",
        threads=THREADS,
    )


def answered(engine: Engine, prompts: list[list[int]]) -> tuple[float, list[list[int]]]:
    """Seconds from the first token of the last request on, and the answers."""
    requests = [
        engine.add(prompt, SamplingParams(max_new_tokens=NEW, temperature=0)) for prompt in prompts
    ]
    while not all(len(each.tokens) > len(each.prompt) for each in requests):
        engine.step()
    began = time.perf_counter()
    while engine.busy:
        engine.step()
    return time.perf_counter() - began, [list(each.output_tokens) for each in requests]


def engine(loaded: LoadedModel, drafting: Drafting | None) -> Engine:
    count_available_blocks(loaded, drafting)  # lays weights out
    return build_engine(loaded, blocks=256, limits=Limits(), drafting=drafting)


def deep() -> Decoder:
    decoder = Decoder(DEEP).requires_grad_(False)
    initialise(decoder, layers=DEEP.layers, seed=1)
    for layer, block in decoder.blocks.items():
        if int(layer) >= EARLY:
            for name, parameter in block.named_parameters():
                if name in ("attn.o.weight", "mlp.down.weight"):
                    parameter.mul_(FAINT)
    return decoder


def replace_layers(spec: ModelSpec, layers: int) -> ModelSpec:
    return ModelSpec.from_dict(
        {**spec.to_dict(), "layers": layers, "name": f"{spec.name}-{layers}"}
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

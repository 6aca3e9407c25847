"""Adapters in one batch compute what each computes alone, merged into its base."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.workers.inference.adapters.folders import adapter_folder
from tests.workers.inference.untrained import BYTES, untrained_folder
from tests.workers.models.adapters import golden
from workers.contracts.specs.inference import SpeculateSpec
from workers.contracts.specs.model import ModelSource
from workers.inference.adapters.grouped_updates import Grouped, Kernel, batched_updates
from workers.inference.adapters.low_rank_slots import SlotSpec
from workers.inference.adapters.token_groups import group_tokens
from workers.inference.engine import Engine
from workers.inference.engine_builder import build_engine
from workers.inference.model_loading import load_model
from workers.inference.sampling.parameters import SamplingParams
from workers.inference.scheduling.policy import Limits
from workers.inference.speculate.setup import Drafting
from workers.models.errors import WeightsError

CPU = torch.device("cpu")
ADAPTERS = {
    "all": {"rank": 4},
    "root": {"method": "rslora", "rank": 3, "targets": ["q", "v", "down"]},
    "wide": {"rank": 6, "alpha": 3.0, "targets": ["k", "gate"]},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return untrained_folder(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory, base):
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: adapter_folder(root / name, base, seed=seed, **options)
        for seed, (name, options) in enumerate(ADAPTERS.items())
    }


def engine_of(
    path: Path, *, slots: int = 0, blocks: int = 200, quantize: str | None = None, **limits: int
) -> Engine:
    loaded = load_model(
        ModelSource(path=str(path)), precision="fp32", device=CPU, quantize=quantize
    )
    if slots:
        loaded = replace(loaded, adapter_slots=SlotSpec(slots, 8))
    return build_engine(loaded, blocks=blocks, limits=Limits(**{"step_tokens": 64, **limits}))


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randint(0, 256, (5 + 7 * number % 23,), generator=generator).tolist()
        for number in range(count)
    ]


def answers(engine: Engine, work, **params) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probabilities of `(prompt, adapter name or None)`."""
    requests = [
        engine.add(
            prompt,
            SamplingParams(**{"max_new_tokens": 8, "temperature": 0, "logprobs": True, **params}),
            adapter=None if name is None else engine.adapters.by_name[name],
        )
        for prompt, name in work
    ]
    while engine.busy:
        engine.step()
    return [(list(each.output_tokens), each.logprobs) for each in requests]


def load(engine: Engine, folders: dict[str, Path]) -> None:
    for name, folder in folders.items():
        engine.adapters.add(engine.adapters.read(name, str(folder)))


@pytest.mark.parametrize(
    ("slots", "blocks", "packed"), [(3, 200, True), (2, 200, False), (1, 24, False)]
)
def test_a_mixed_batch_answers_as_each_merged_model_does(
    base, folders, slots, blocks, packed, monkeypatch
):
    # joined linears, as on CPUs of AMD
    monkeypatch.setattr("workers.inference.cpu.matmul.onednn_pays", lambda name: packed)
    names = [None, *folders]
    work = [(prompt, names[number % 4]) for number, prompt in enumerate(prompts(14))]
    engine = engine_of(base, slots=slots, blocks=blocks, sequences=9)
    load(engine, folders)
    together = answers(engine, work)
    for name in names:
        alone = engine_of(base if name is None else folders[name])
        own = [number for number, (_, adapter) in enumerate(work) if adapter == name]
        expected = answers(alone, [(work[number][0], None) for number in own])
        for number, (tokens, logprobs) in zip(own, expected, strict=True):
            assert together[number][0] == tokens, name
            assert together[number][1] == pytest.approx(logprobs, abs=1e-4)
    assert len({tuple(tokens) for tokens, _ in together}) > 10
    assert engine.scheduler.pool.used == 0


def test_answers_of_peft_files_have_pefts_logits(tmp_path):
    golden.base(tmp_path / "base")
    expected = json.loads((golden.FOLDER / "logits.json").read_text())
    engine = engine_of(tmp_path / "base", slots=2)
    prompt = golden.TOKENS[0]
    load(engine, {"lora": golden.FOLDER / "lora"})
    seen, compute = [], engine.runner.compute
    engine.runner.compute = lambda inputs: seen.append(compute(inputs)) or seen[-1]
    answers(engine, [(prompt, "lora")], max_new_tokens=1)
    wanted = torch.tensor(expected["lora"])[-1]
    torch.testing.assert_close(seen[0][-1, :8], wanted, rtol=1e-5, atol=1e-5)


def test_no_prefix_of_another_adapter_is_used(base, folders):
    engine = engine_of(base, slots=2)
    load(engine, folders)
    prompt = list(range(50))

    def cached(name: str | None) -> int:
        before = engine.counts.cached_tokens
        answers(engine, [(prompt, name)])
        return engine.counts.cached_tokens - before

    names = (None, "all", "wide")
    assert [cached(name) for name in (*names, *names)] == [0, 0, 0, 48, 48, 48]
    engine.adapters.remove("all")
    load(engine, {"all": folders["root"]})
    assert cached("all") == 0, "another adapter of the same name"
    first = answers(engine, [(prompt, "all")])
    assert first == answers(engine, [(prompt, "all")])


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_updates_are_added_to_quantized_linears(base, folders, quantize):
    engine = engine_of(base, slots=2, quantize=quantize)
    load(engine, folders)
    adapter = engine.adapters.by_name["all"]
    engine.adapters.place(adapter, running=())
    linear = engine.runner.decoder.blocks["0"].mlp.down
    x = torch.randn(1, 5, 48)
    plain = linear(x)
    engine.runner.adapters.begin([adapter.slot, -1], [3, 5])
    both = linear(x)
    engine.runner.adapters.end()
    update = adapter.updates["blocks.0.mlp.down"]
    expected = update.scale * x[:, :3] @ update.a.T @ update.b.T
    torch.testing.assert_close((both - plain)[:, :3], expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(both[:, 3:], plain[:, 3:])


def test_drafts_change_no_token_of_an_adapter(base, folders):
    loaded = replace(
        load_model(ModelSource(path=str(base)), precision="fp32", device=CPU),
        adapter_slots=SlotSpec(3, 8),
    )
    drafting = Drafting(SpeculateSpec(ngram=1, tokens=3, adaptive=False), None)
    drafts = build_engine(loaded, blocks=200, limits=Limits(step_tokens=64), drafting=drafting)
    work = [(prompt[:3] * 6, name) for prompt, name in zip(prompts(4), folders, strict=False)]
    load(drafts, folders)
    plain = engine_of(base, slots=3)
    load(plain, folders)
    repeated = answers(drafts, work, max_new_tokens=24)
    assert [tokens for tokens, _ in repeated] == [
        tokens for tokens, _ in answers(plain, work, max_new_tokens=24)
    ]
    assert drafts.counts.drafted > 0


@pytest.mark.parametrize("slots", [[1, 2, 3, -1], [0, 0, 3, 4, -1], [2], [0, 5, -1]])
@pytest.mark.parametrize("width", [12, 10])
def test_every_way_to_batch_gives_the_sum_by_definition(slots, width):
    torch.manual_seed(1)
    for more in (0, 1, 30):
        ends = list(accumulate(4 + more * place for place in range(len(slots))))
        groups = group_tokens(slots, ends, count=6, device=CPU)
        x, out = torch.randn(ends[-1], width), torch.randn(ends[-1], 8)
        a, b = torch.randn(6, 8, width), torch.randn(6, 4, 8)
        expected = out.clone()
        for slot, first, end in zip(slots, [0, *ends], ends, strict=False):
            if slot >= 0:
                expected[first:end] += x[first:end] @ a[slot, 4:].T @ b[slot]
        for updates in (batched_updates(groups, 4), Kernel(groups), Grouped(groups, 4)):
            result = torch.cat([out, out], dim=1)
            updates.expand(updates.project(x, a)[..., 4:], b, result[:, 8:])
            torch.testing.assert_close(result[:, 8:], expected, rtol=1e-5, atol=1e-5)
            assert torch.equal(result[:, :8], out)


def test_least_recently_used_adapters_leave_slots_and_memory(base, folders, tmp_path):
    engine = engine_of(base, slots=1)
    many = {f"copy{n}": shutil.copytree(folders["all"], tmp_path / f"copy{n}") for n in range(6)}
    load(engine, many)
    store = engine.adapters
    with_copy = [name for name, each in store.by_name.items() if each.updates is not None]
    assert with_copy == ["copy2", "copy3", "copy4", "copy5"], "four times the slots"
    first = answers(engine, [(prompts(1)[0], "copy0")])
    assert store.by_name["copy0"].slot == 0
    assert answers(engine, [(prompts(1)[0], "copy1")])[0][0] == first[0][0]
    assert (store.by_name["copy0"].slot, store.by_name["copy1"].slot) == (None, 0)
    store.by_name["copy0"].updates = None
    shutil.copytree(folders["wide"], many["copy0"], dirs_exist_ok=True)
    with pytest.raises(WeightsError, match="changed since it was loaded"):
        engine.add([1], SamplingParams(), adapter=store.by_name["copy0"])
    gone = store.remove("copy5")
    with pytest.raises(WeightsError, match="copy5 was unloaded"):
        engine.add([1], SamplingParams(), adapter=gone)
    with pytest.raises(WeightsError, match="already loaded"):
        store.add(store.read("copy1", str(many["copy1"])))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "dora", "rank": 2}, "is DoRA.*serve it alone, as the model's path"),
        ({"method": "ia3"}, "is IA3; only LoRA adapters"),
        ({"method": "prompt", "rank": 2}, "PROMPT_TUNING.*this server cannot compute it"),
        ({"method": "bitfit"}, "ORRERY-BITFIT"),
        ({"rank": 9}, "has rank 9, this server holds at most 8; set serve.adapter_rank 9"),
    ],
)
def test_adapters_that_slots_cannot_hold_are_refused(base, tmp_path, options, message):
    folder = adapter_folder(tmp_path / "refused", base, **options)
    with pytest.raises(WeightsError, match=message):
        engine_of(base, slots=1).adapters.read("refused", str(folder))


@pytest.mark.parametrize("method", ["dora", "ia3"])
def test_a_refused_adapter_is_served_alone_as_its_error_advises(method, tmp_path):
    """As the model's path: the engine then computes PEFT's own logits."""
    golden.base(tmp_path / "base")
    folder = tmp_path / method
    shutil.copytree(golden.FOLDER / method, folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(tmp_path / "base")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsError, match="serve it alone, as the model's path"):
        engine_of(tmp_path / "base", slots=1).adapters.read(method, str(folder))
    engine = engine_of(folder)
    logits = json.loads((golden.FOLDER / "logits.json").read_text())[method]
    rows = []
    original = engine.runner.decoder.logits

    def recorded(hidden):
        out = original(hidden)
        rows.append(out[0])
        return out

    engine.runner.decoder.logits = recorded
    answers(engine, [(golden.TOKENS[0], None)], max_new_tokens=0, prompt_logprobs=1)
    torch.testing.assert_close(torch.cat(rows)[:, :8], torch.tensor(logits), rtol=1e-5, atol=1e-5)


def test_an_adapter_for_another_base_is_refused(base, folders, tmp_path):
    for name in ("wider", "other"):
        (tmp_path / name).mkdir()
    wider = untrained_folder(tmp_path / "wider", {**BYTES, "ffn": 64})
    with pytest.raises(WeightsError, match=r"needs \[.*give the adapter's own base"):
        engine_of(wider, slots=1).adapters.read("all", str(folders["all"]))
    other = untrained_folder(tmp_path / "other", {**BYTES, "name": "x"})
    weights = next((tmp_path / "other").glob("*.safetensors"))
    tensors = {name: tensor * 1.01 for name, tensor in load_file(weights).items()}
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=r"was trained over .* differ"):
        engine_of(other, slots=1).adapters.read("all", str(folders["all"]))
    with pytest.raises(WeightsError, match="does not exist"):
        engine_of(base, slots=1).adapters.read("none", str(tmp_path / "none"))

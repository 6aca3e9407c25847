"""The engine on small models: against the model itself, unbatched, and with little memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from workers.contracts.specs.model import ModelSpec
from workers.inference.engine import Engine
from workers.inference.kv_cache.block_pool import BlockPool
from workers.inference.kv_cache.cpu_swap import CpuBlocks, SwapCosts
from workers.inference.kv_cache.paged_cache import PagedCache, block_bytes
from workers.inference.request import Request
from workers.inference.runner import Runner
from workers.inference.sampling.parameters import SamplingParams
from workers.inference.scheduling.policy import Limits
from workers.inference.scheduling.scheduler import Scheduler
from workers.inference.scheduling.step_inputs import build_step_inputs
from workers.models.decoder import Decoder

SWAP = 8
TINY = {
    "layers": 2,
    "hidden": 32,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 48,
    "vocab": 61,
    "max_seq_len": 128,
}
MIXED = [
    SamplingParams(max_new_tokens=9, temperature=0),
    SamplingParams(max_new_tokens=14, seed=3),
    SamplingParams(max_new_tokens=7, temperature=0.7, top_k=9, seed=4),
    SamplingParams(max_new_tokens=20, temperature=1.3, top_p=0.8, seed=5, repetition_penalty=1.3),
    SamplingParams(
        max_new_tokens=11,
        min_p=0.1,
        seed=6,
        presence_penalty=0.5,
        frequency_penalty=0.3,
        logprobs=True,
    ),
]
SHAPES: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha-learned": {
        "kv_heads": 4,
        "position": "learned",
        "norm": "layernorm",
        "bias": "all",
        "gated_mlp": False,
    },
    "mqa-window": {"kv_heads": 1, "window": 6, "qk_norm": True},
    "mla": {
        "kv_heads": 4,
        "attention": "mla",
        "mla": {
            "q_lora_rank": 12,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
        },
    },
    "mla-window": {
        "kv_heads": 4,
        "attention": "mla",
        "window": 6,
        "mla": {
            "q_lora_rank": None,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
        },
    },
    "mfa": {"kv_heads": 4, "attention": "mfa", "mfa": {"qk_rank": 8, "head_dim": 8, "heads": 6}},
    "moe": {"moe": {"experts": 5, "top_k": 2, "expert_ffn": 16}},
}


def model_of(**more: Any) -> Decoder:
    decoder = Decoder(ModelSpec.from_dict({"name": "tiny", **TINY, **more}))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.normal_(
                1.0 if name.endswith("norm.weight") else 0.0, 0.3, generator=generator
            )
    return decoder


def engine_of(
    decoder: Decoder,
    *,
    blocks: int = 100,
    block_size: int = 4,
    cache_dtype: torch.dtype = torch.float32,
    **limits: Any,
) -> Engine:
    shape = {"blocks": blocks, "block_size": block_size}
    cache = PagedCache(
        decoder.spec, **shape, dtype=cache_dtype, device=torch.device("cpu"), swap=SWAP
    )
    assert sum(each.nbytes for each in cache.tensors()) == blocks * block_bytes(
        decoder.spec, block_size=4, dtype=cache_dtype
    )
    scheduler = Scheduler(
        BlockPool(**shape), Limits(**limits), window=decoder.spec.window, swap=CpuBlocks(SWAP)
    )
    scheduler.swapper.costs = SwapCosts(block_s=1e-9, token_s=1.0)
    return Engine(
        Runner(decoder, cache), scheduler, context=decoder.spec.max_seq_len, decode=spelled
    )


def spelled(ids: Any) -> str:
    return "".join(chr(ord("0") + each) for each in ids)


def prompts(count: int, vocab: int = 61) -> list[list[int]]:
    """Prompts of 1 to 37 tokens; every second one shares a prefix."""
    first = [place * 11 % vocab for place in range(37)]
    others = [
        [(number * 5 + place * place) % vocab for place in range(1 + number * 9 % 31)]
        for number in range(count)
    ]
    return [
        first[: 1 + number * 7 % 37] if number % 2 else others[number] for number in range(count)
    ]


def finished(engine: Engine, given: list[tuple[list[int], SamplingParams]]) -> list[Request]:
    requests = [engine.add(*each) for each in given]
    finished_requests: list[Request] = []
    while engine.busy:
        finished_requests += [each for each in engine.step() if each.finish]
    assert engine.scheduler.pool.used == 0
    assert {each.parent for each in finished_requests} == {each.number for each in requests}
    return requests


def without_cache(decoder: Decoder, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens from the full sequence each time."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(decoder(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("shape", SHAPES)
def test_batched_equals_unbatched_equals_the_model(shape):
    given = [(prompt, MIXED[number % len(MIXED)]) for number, prompt in enumerate(prompts(10))]
    plain = model_of(**SHAPES[shape]).eval()
    together = finished(engine_of(model_of(**SHAPES[shape]), step_tokens=24, sequences=6), given)
    alone_engine = engine_of(model_of(**SHAPES[shape]), sequences=1)
    alone = [finished(alone_engine, [each])[0] for each in given]
    assert [each.output_tokens for each in together] == [each.output_tokens for each in alone]
    assert [len(each.output_tokens) for each in together] == [
        params.max_new_tokens for _, params in given
    ]
    for (prompt, params), request in zip(given, together, strict=True):
        if params.greedy:
            assert request.output_tokens == without_cache(plain, prompt, params.max_new_tokens)
        if params.logprobs:
            ids = torch.tensor([[*prompt, *request.output_tokens]])
            with torch.no_grad():
                rows = plain(ids)[0, len(prompt) - 1 : -1].log_softmax(-1)
            expected = rows.gather(1, torch.tensor(request.output_tokens)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(request.logprobs), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("shape", ["gqa", "mqa-window"])
def test_rotation_and_cache_write_in_one_launch(shape):
    """As on a GPU: the attention takes queries and keys before their rotation."""
    given = [(prompt, MIXED[number % len(MIXED)]) for number, prompt in enumerate(prompts(6))]
    expected = finished(engine_of(model_of(**SHAPES[shape])), given)
    engine = engine_of(model_of(**SHAPES[shape]))
    for block in engine.runner.decoder.blocks.values():
        block.attn.attend.rotates = True
    fused = finished(engine, given)
    assert [each.output_tokens for each in fused] == [each.output_tokens for each in expected]


def test_little_memory_preempts_without_changing_tokens():
    given = [(prompt, MIXED[number % len(MIXED)]) for number, prompt in enumerate(prompts(12))]
    plenty = finished(engine_of(model_of(), sequences=8), given)
    scarce = engine_of(model_of(), blocks=15, sequences=8, watermark=0, step_tokens=16)
    assert [each.output_tokens for each in finished(scarce, given)] == [
        each.output_tokens for each in plenty
    ]
    assert scarce.scheduler.preemption.count > 0 and scarce.scheduler.swapper.total > 0


def test_int8_cache_is_close_and_rows_are_independent():
    params = SamplingParams(max_new_tokens=10, temperature=0, logprobs=True)
    given = [(prompt, params) for prompt in prompts(8)]
    exact = finished(engine_of(model_of()), given)
    alone = engine_of(model_of(), cache_dtype=torch.int8, sequences=1)
    together = finished(
        engine_of(model_of(), cache_dtype=torch.int8, blocks=22, step_tokens=16, watermark=0), given
    )
    assert [each.output_tokens for each in together] == [
        finished(alone, [each])[0].output_tokens for each in given
    ]
    errors = [abs(a.logprobs[0] - b.logprobs[0]) for a, b in zip(exact, together, strict=True)]
    assert 0 < max(errors) < 0.1


def test_answers_to_one_prompt_share_its_blocks_and_differ():
    engine = engine_of(model_of(), sequences=8)
    params = SamplingParams(max_new_tokens=12, seed=9, n=4)
    request = engine.add(prompts(8)[7], params)
    finished_requests: list[Request] = []
    peak = 0
    while engine.busy:
        finished_requests += [each for each in engine.step() if each.finish]
        peak = max(peak, engine.scheduler.pool.used)
    assert sorted(each.answer for each in finished_requests) == [0, 1, 2, 3]
    assert len({tuple(each.output_tokens) for each in finished_requests}) == 4
    assert peak <= 37 // 4 + 4 * 5, "the prompt's full blocks exist once"
    alone = finished(
        engine_of(model_of()), [(list(request.prompt), SamplingParams(max_new_tokens=12, seed=9))]
    )[0]
    assert (
        next(each for each in finished_requests if each.answer == 0).output_tokens
        == alone.output_tokens
    )


def test_stop_tokens_stop_strings_context_and_abort():
    decoder = model_of()
    prompt = prompts(3)[2]
    plain = finished(
        engine_of(decoder), [(prompt, SamplingParams(max_new_tokens=20, temperature=0))]
    )[0].output_tokens
    end, stop = plain[4], spelled(plain[6:8])
    greedy = {"max_new_tokens": 20, "temperature": 0}
    first = plain.index(end) + 1
    params = [
        SamplingParams(**greedy, stop_token_ids=(end,)),
        SamplingParams(**greedy, stop_token_ids=(end,), ignore_eos=True),
        SamplingParams(**greedy, stop=(stop, "never")),
        SamplingParams(**{**greedy, "max_new_tokens": 500}),
    ]
    engine = engine_of(model_of())
    by_id, ignored, stopped, longest = finished(engine, [(prompt, each) for each in params])
    assert (by_id.output_tokens, by_id.finish) == (plain[:first], "stop")
    assert (ignored.output_tokens, ignored.finish) == (plain, "length")
    assert stopped.finish == "stop" and spelled(stopped.output_tokens).endswith(stop)
    assert stopped.output_tokens == plain[: len(stopped.output_tokens)]
    assert len(longest.tokens) == 128 and longest.finish == "length"
    aborted, other = engine.add(prompt, params[3]), engine.add(prompt, params[1])
    engine.step()
    engine.abort(aborted)
    while engine.busy:
        engine.step()
    assert (
        aborted.finish == "aborted"
        and other.output_tokens == plain
        and engine.scheduler.pool.used == 0
    )


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([1] * 128, {}, "has 128 tokens, the model's context is 128"),
        ([1, 61], {}, "token id 61; the model's ids are 0 to 60"),
        ([1], {"temperature": -1.0}, "temperature is -1.0"),
        ([1], {"temperature": float("nan")}, "temperature is nan"),
        ([1], {"top_p": 0.0}, "top_p is 0; it must be above 0"),
        ([1], {"stop": ("",)}, "non-empty"),
    ],
)
def test_bad_requests_raise(prompt, params, message):
    with pytest.raises(ValueError, match=message):
        engine_of(model_of()).add(prompt, SamplingParams(**params))


def test_dynamic_rotary_scaling_is_refused():
    with pytest.raises(ValueError, match="dynamic rotary scaling"):
        engine_of(model_of(rope={"scaling": {"name": "dynamic", "factor": 2.0}}))


def test_a_step_uploads_its_integers_once_and_reads_none_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each copy to a GPU, and each value read back, would cost a step a wait."""
    engine = engine_of(model_of())
    for prompt in prompts(5):
        engine.add(prompt, SamplingParams(max_new_tokens=4, temperature=0))
    plan = engine.scheduler.schedule()
    inputs = build_step_inputs(plan, 4)
    runner = engine.runner
    assert isinstance(runner, Runner)
    uploads: list[int] = []
    make = torch.tensor

    def counted(*args: Any, **options: Any) -> torch.Tensor:
        uploads.append(1)
        return make(*args, **options)

    def refused(*_: Any) -> None:
        raise AssertionError("a value is read back")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "tensor", counted)
        for name in ("item", "tolist", "__bool__", "__int__"):
            patched.setattr(torch.Tensor, name, refused)
        tokens, positions, indices, metadata = runner._upload(inputs)
    assert len(uploads) == 1
    assert tokens.tolist() == inputs.tokens and positions.tolist() == inputs.positions
    assert indices.tolist() == inputs.logit_indices and metadata.slots_T.tolist() == inputs.slots
    assert metadata.table.tolist() == inputs.table and metadata.lens.tolist() == inputs.context_lens
    assert metadata.cu is not None and metadata.cu.tolist() == [0, *inputs.query_ends]
    assert metadata.plan.longest == max(inputs.context_lens)

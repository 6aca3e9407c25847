"""Speculative decoding gives the same tokens or the same distribution as without it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from tests.workers.inference.test_engine import MIXED, finished, model_of, prompts, spelled
from workers.inference.engine import Engine
from workers.inference.kv_cache.block_pool import BlockPool
from workers.inference.kv_cache.paged_cache import PagedCache
from workers.inference.request import Request
from workers.inference.runner import Runner
from workers.inference.sampling.parameters import SamplingParams
from workers.inference.sampling.sampler import Row, adjust_logits, compute_weights, sample_at
from workers.inference.scheduling.policy import Limits
from workers.inference.scheduling.scheduler import Scheduler
from workers.inference.speculate.draft import ModelDraft
from workers.inference.speculate.lengths import Lengths
from workers.inference.speculate.ngram import NgramDraft
from workers.inference.speculate.proposal import Proposer
from workers.inference.speculate.speculator import Speculator
from workers.inference.speculate.verify import verify_drafts
from workers.models.decoder import Decoder

GREEDY = SamplingParams(max_new_tokens=40, temperature=0)


def near(decoder: Decoder, by: float = 0.002, **more: Any) -> Decoder:
    """A draft: the same weights, a little off."""
    draft = model_of(**more)
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            retained = dict(decoder.named_parameters())[name]
            parameter.copy_(retained + by * torch.randn(retained.shape, generator=generator))
    return draft


def speculating(
    decoder: Decoder,
    draft: Decoder | None,
    *,
    tokens: int = 4,
    adaptive: bool = False,
    blocks: int = 100,
    **limits: Any,
) -> Engine:
    """With a draft model, or with n-gram drafts."""
    shape = {"blocks": blocks, "block_size": 4}
    retained = {"dtype": torch.float32, "device": torch.device("cpu")}
    pool = BlockPool(**shape)
    proposer: Proposer = NgramDraft(3)
    if draft is not None:
        proposer = ModelDraft(
            Runner(draft, PagedCache(draft.spec, **shape, **retained)),
            pool,
            context=draft.spec.max_seq_len - 8,
        )
    runner = Runner(decoder, PagedCache(decoder.spec, **shape, **retained))
    speculator = Speculator(proposer, tokens=tokens, adaptive=adaptive)
    return Engine(
        runner,
        Scheduler(pool, Limits(**limits), window=decoder.spec.window),
        context=decoder.spec.max_seq_len,
        decode=spelled,
        speculator=speculator,
    )


def plain(decoder: Decoder, **limits: Any) -> Engine:
    engine = speculating(decoder, None, **limits)
    engine.speculator = None
    return engine


@pytest.mark.parametrize("way", ["near", "far", "looked-up"])
@pytest.mark.parametrize("adaptive", [False, True])
def test_greedy_and_looked_up_answers_are_the_plain_ones(way, adaptive):
    decoder = model_of()
    params = MIXED if way == "looked-up" else [each for each in MIXED if each.greedy]
    params = [
        GREEDY,
        *params,
        SamplingParams(
            max_new_tokens=30, temperature=0, repetition_penalty=1.3, presence_penalty=0.4
        ),
    ]
    given = [(prompt, params[number % len(params)]) for number, prompt in enumerate(prompts(9))]
    wanted = [each.output_tokens for each in finished(plain(model_of(), sequences=6), given)]
    draft = {"near": near(decoder), "far": near(decoder, 1.0), "looked-up": None}[way]
    engine = speculating(decoder, draft, adaptive=adaptive, sequences=6, step_tokens=40)
    result = finished(engine, given)
    assert [each.output_tokens for each in result] == wanted
    assert engine.counts.accepted == sum(each.accepted for each in result)
    if way == "near" and not adaptive:
        assert engine.counts.accepted > 0.7 * engine.counts.drafted > 0
    scarce = speculating(
        decoder, draft, adaptive=adaptive, blocks=17, sequences=6, step_tokens=16, watermark=0
    )
    assert [each.output_tokens for each in finished(scarce, given)] == wanted
    assert scarce.scheduler.preemption.count > 0


@pytest.mark.parametrize(
    "own", [None, 6, 13], ids=["looked up", "a narrower draft", "a wider draft"]
)
def test_blocks_behind_a_window_are_freed_with_drafts(own):
    decoder = model_of(window=10)
    given = [(prompt, GREEDY) for prompt in prompts(4)]
    wanted = [each.output_tokens for each in finished(plain(model_of(window=10)), given)]
    engine = speculating(decoder, None if own is None else near(decoder, window=own), sequences=4)
    requests, retained = [engine.add(*each) for each in given], []
    while engine.busy:
        engine.step()
        retained += [
            len(each.blocks) - each.freed_blocks
            for each in engine.scheduler.running
            if len(each.tokens) > 30
        ]
    assert [each.output_tokens for each in requests] == wanted and engine.counts.drafted
    assert max(retained) <= 6, "a window, a draft, and the ends of both"


def test_what_ends_an_answer_ends_it_inside_an_accepted_stretch():
    decoder = model_of()
    prompt = prompts(3)[2]
    tokens = finished(plain(model_of()), [(prompt, GREEDY)])[0].output_tokens
    for place in range(1, 12):
        stop = spelled(tokens[place : place + 2])
        params = [
            SamplingParams(max_new_tokens=place, temperature=0),
            SamplingParams(max_new_tokens=40, temperature=0, stop_token_ids=(tokens[place],)),
            SamplingParams(
                max_new_tokens=40, temperature=0, stop=(stop,), logprobs=True, top_logprobs=2
            ),
        ]
        wanted = finished(plain(model_of()), [(prompt, each) for each in params])
        result = finished(
            speculating(decoder, near(decoder, 0.0), tokens=7), [(prompt, each) for each in params]
        )
        for one, other in zip(result, wanted, strict=True):
            assert (one.output_tokens, one.finish) == (other.output_tokens, other.finish)
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert [token for (token, _), _ in result[2].top_logprobs] == result[2].output_tokens
        assert result[0].accepted > 0 or place < 3


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.6, "top_k": 4},
        {"temperature": 1.4, "top_p": 0.8},
        {"min_p": 0.2, "presence_penalty": 0.7},
    ],
    ids=str,
)
def test_two_tokens_are_distributed_as_without_drafts(params):
    """Chi-square of all pairs of tokens, one accepted or resampled, one after it;
    seeds are fixed.
    """
    target = torch.tensor(
        [[1.2, 0.4, 0.0, -0.5, -1.0], [0.0, 1.0, -0.3, 0.8, 0.1], [0.5, 0.5, 0.2, 0.0, 1.0]]
    )
    draft = torch.tensor([[0.2, 1.4, 0.3, -1.5, 0.0], [0.8, 0.0, 0.3, 0.8, -2.0]])
    draws = 2500
    requests = [Request((0,), SamplingParams(seed=seed, **params)) for seed in range(draws)]
    draft_probs: dict[Request, Any] = {each: [] for each in requests}
    for place in range(2):
        _draft(draft[place], requests, draft_probs)
    draft_probs = {request: torch.stack(rows) for request, rows in draft_probs.items()}
    groups = [[Row(request, ahead) for ahead in range(3)] for request in requests]
    answers = verify_drafts(target.repeat(draws, 1), groups, draft_probs)
    for request, drawn in zip(requests, answers, strict=True):
        request.tokens += [each.token for each in drawn]
    short = [each for each in requests if len(each.output_tokens) == 1]
    for request, (each,) in zip(
        short,
        verify_drafts(target[1].expand(len(short), -1), [[Row(r)] for r in short], {}),
        strict=True,
    ):
        request.tokens.append(each.token)
    result = Counter(tuple(each.output_tokens[:2]) for each in requests)
    alone = [Request((0,), SamplingParams(seed=seed + draws, **params)) for seed in range(draws)]
    for place in range(2):
        for request, (each,) in zip(
            alone,
            verify_drafts(target[place].expand(draws, -1), [[Row(r)] for r in alone], {}),
            strict=True,
        ):
            request.tokens.append(each.token)
    wanted = Counter(tuple(each.output_tokens) for each in alone)
    assert 0.2 * draws < len(short) < 0.8 * draws
    off, freedom = 0.0, -1
    for pair in {*result, *wanted}:
        if result[pair] + wanted[pair] >= 10:
            off += (result[pair] - wanted[pair]) ** 2 / (result[pair] + wanted[pair])
            freedom += 1
    assert off < freedom + 3.5 * (2 * freedom) ** 0.5


def _go_on(logits_V: torch.Tensor, requests: list[Request]) -> None:
    rows = [[Row(each)] for each in requests]
    for request, (drawn,) in zip(
        requests, verify_drafts(logits_V.expand(len(rows), -1), rows, {}), strict=True
    ):
        request.tokens.append(drawn.token)


def _draft(
    logits_V: torch.Tensor, requests: list[Request], draft_probs: dict[Request, Any]
) -> None:
    rows = [Row(each, len(each.draft)) for each in requests]
    shares = compute_weights(adjust_logits(logits_V.expand(len(rows), -1), rows), rows)
    shares /= shares.sum(-1, keepdim=True)
    for request, token, share in zip(
        requests, sample_at(shares, [r.uniform("draft") for r in rows]), shares, strict=True
    ):
        request.draft.append(token)
        draft_probs[request].append(share)


def test_drawn_answers_depend_on_their_seed_and_not_on_their_neighbors():
    decoder = model_of()
    given = [(prompt, MIXED[1 + number % 4]) for number, prompt in enumerate(prompts(10))]
    together = speculating(decoder, near(decoder, 0.02), sequences=6)
    result = finished(together, given)
    assert 0.3 * together.counts.drafted < together.counts.accepted
    alone = [
        finished(speculating(model_of(), near(decoder, 0.02), sequences=1), [each])[0]
        for each in given
    ]
    assert [each.output_tokens for each in result] == [each.output_tokens for each in alone]
    for request in result:
        assert len(request.output_tokens) == request.sampling.max_new_tokens
        assert len(request.logprobs) == (request.sampling.logprobs and len(request.output_tokens))


def test_lengths_follow_what_pays():
    """A pass costs 10 ms and a token 0.1; a draft pass costs `draft_s`."""

    def settled(draft_s: float, odds: float, lengths: Lengths, steps: int = 300) -> list[int]:
        request, used, owed = Request((1,), SamplingParams()), [], 0.0
        for _ in range(steps):
            (length,) = lengths.choose([request])
            used.append(length)
            for _ in range(length):
                lengths.draft.add(1, draft_s)
            lengths.target.add(1 + length, 0.01 + 0.0001 * length)
            if length:
                owed += length * odds
                accepted = min(length, int(owed))
                owed -= accepted
                lengths.record(request, accepted=accepted, drafted=length)
        return used

    lengths = Lengths(6, adaptive=True)
    assert sum(settled(0.0005, 0.95, lengths)[-50:]) > 5 * 45
    assert sum(settled(0.0095, 0.3, lengths)[-50:]) < 15, "it rests"
    assert sum(settled(0.0005, 0.95, lengths, 2200)[-50:]) > 5 * 45, "it is tried again"
    assert set(settled(1.0, 0.0, Lengths(3, adaptive=False))) == {3}

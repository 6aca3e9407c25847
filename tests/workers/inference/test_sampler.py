"""Sampling from given logits: truncation, penalties, frequencies, stop strings."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
import torch

from workers.inference.request import Request
from workers.inference.sampling import sampler
from workers.inference.sampling.parameters import SamplingParams
from workers.inference.sampling.sampler import Row, compute_weights, sample_at
from workers.inference.speculate.verify import verify_drafts
from workers.inference.text.stop_strings import IncrementalText, truncate_at_stop

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])


def drawn(
    draws: int = 4000, prompt: tuple[int, ...] = (0,), new: tuple[int, ...] = (), **params: Any
) -> Counter[int]:
    rows = [
        Row(Request(prompt, SamplingParams(seed=seed, **params), tokens=[*prompt, *new]))
        for seed in range(draws)
    ]
    return Counter(
        each.token
        for (each,) in verify_drafts(LOGITS.expand(draws, -1), [[row] for row in rows], {})
    )


@pytest.mark.parametrize(
    ("params", "retained"),
    [
        ({}, 6),
        ({"temperature": 0.5}, 6),
        ({"top_k": 2}, 2),
        ({"top_k": 99}, 6),
        ({"top_p": 0.6}, 2),
        ({"top_p": 1e-9}, 1),
        ({"min_p": 0.2}, 3),
        ({"top_k": 4, "top_p": 0.7}, 2),
        ({"temperature": 1e-6, "top_p": 0.9}, 1),
        ({"temperature": 2.0, "min_p": 0.3}, 4),
    ],
    ids=str,
)
def test_frequencies_match_the_truncated_distribution(params, retained):
    probabilities = (LOGITS.double() / params.get("temperature", 1)).softmax(-1)
    probabilities[retained:] = 0
    probabilities /= probabilities.sum()
    counts = drawn(**params)
    expected = probabilities * 4000
    assert all(expected[token] > 0 for token in counts)
    tested = expected >= 5
    chi_square = sum(
        (counts[token] - expected[token]) ** 2 / expected[token]
        for token in tested.nonzero().flatten().tolist()
    )
    assert chi_square < 27, "at most 5 degrees of freedom, p = 6e-5; seeds are fixed"


def test_truncation_among_candidates_equals_full_sort(monkeypatch):
    """With ties at the edge, truncation beyond the candidates, and flat rows."""
    steep, flat = torch.randn(6, 3000, generator=torch.Generator().manual_seed(1)).split(3)
    logits = torch.cat([4 * steep, 0.1 * flat, torch.round(3 * steep), torch.zeros(3, 3000)])
    parameters = [
        {"top_p": 0.9},
        {"top_p": 0.3, "min_p": 0.01},
        {"top_k": 40},
        {"top_k": 511},
        {"top_k": 512},
        {"top_k": 700},
        {"min_p": 0.05},
        {"top_k": 50, "top_p": 0.8},
        {"top_p": 1e-6},
        {"top_p": 0.999, "temperature": 3.0},
    ]
    beyond = 0
    for params in parameters:
        rows = [
            Row(Request((0,), SamplingParams(seed=seed, **params))) for seed in range(len(logits))
        ]
        weights = compute_weights(logits, rows)
        alone = torch.cat(
            [
                compute_weights(logits[each : each + 1], rows[each : each + 1])
                for each in range(len(logits))
            ]
        )
        assert torch.equal(weights, alone), "no row depends on its neighbors"
        with monkeypatch.context() as patch:
            patch.setattr(sampler, "_CANDIDATES", 3000)
            sorted_ = compute_weights(logits, rows)
        assert torch.equal(weights > 0, sorted_ > 0)
        torch.testing.assert_close(weights, sorted_, rtol=1e-13, atol=0)
        for uniform in torch.rand(50, generator=torch.Generator().manual_seed(2)).tolist():
            assert sample_at(weights, [uniform] * len(rows)) == sample_at(
                sorted_, [uniform] * len(rows)
            )
        beyond += int(((weights > 0).sum(-1) >= 512).sum())
    assert beyond, "some rows retain more than the candidates"


def test_penalties():
    assert drawn(1, temperature=0) == {0: 1}
    assert drawn(1, prompt=(0,), temperature=0, repetition_penalty=2.5) == {1: 1}
    assert drawn(1, prompt=(0,), temperature=0, presence_penalty=5) == {0: 1}, (
        "the prompt is not counted"
    )
    assert drawn(
        1, prompt=(5,), new=(0, 0), temperature=0, presence_penalty=0.6, frequency_penalty=0.3
    ) == {1: 1}
    assert drawn(
        1, prompt=(5,), new=(0,), temperature=0, presence_penalty=0.6, frequency_penalty=0.3
    ) == {0: 1}


def test_logits_that_are_not_finite_raise():
    with pytest.raises(ArithmeticError, match="not finite numbers"):
        verify_drafts(
            torch.tensor([[1.0, float("nan")]]), [[Row(Request((0,), SamplingParams()))]], {}
        )


def test_stop_strings_across_tokens_and_partial_characters():
    data = "über — alles gut".encode()

    def decode(ids):
        return bytes(ids).decode(errors="replace")

    text = IncrementalText(decode, ["s g", "nie"])
    stopped = [text.add(each) for each in data]
    assert stopped.index(True) == data.index(b"s g") + 2 and text.text == "über — alles gut"
    assert (
        truncate_at_stop(text.text, ["gut", "s g"]) == "über — alle"
        and truncate_at_stop("a", []) == "a"
    )
    assert not any(IncrementalText(decode, ["x"]).add(each) for each in json.dumps([1]).encode())

"""Documents packed into sequences, compared with each document computed separately."""

from __future__ import annotations

import pytest
import torch

from workers.contracts.specs.model import ModelSpec
from workers.models.decoder import Decoder
from workers.models.initialize import initialize
from workers.models.layers import documents as pieces
from workers.models.layers.attention_math import attend
from workers.models.layers.documents import Documents

CPU = torch.device("cpu")
# short ones that share a call, one alone, one longer than a tile, a row of one, a row of single
# tokens
RAGGED = Documents([[0, 1, 5, 40, 41], [0], list(range(150)), [0, 70, 149]], 150, CPU)
SHORT = Documents([[0, 2, 3, 9], [0, 10, 11]], 12, CPU)
# heads, key-value heads, head dim of queries, of values
SHAPES = [(4, 4, 8, 8), (4, 2, 8, 8), (3, 1, 12, 8), (2, 2, 8, 12)]


def alone(documents: Documents, *rows: torch.Tensor, **how) -> torch.Tensor:
    result = []
    for row, starts in enumerate(documents.starts):
        for start, stop in zip(starts, [*starts[1:], documents.length], strict=True):
            result.append(attend(*(x[row : row + 1, start:stop] for x in rows), **how))
    return torch.cat(result, dim=1).view(len(documents.starts), documents.length, -1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [None, 3, 20])
@pytest.mark.parametrize("documents", [RAGGED, SHORT, Documents([[0], [0]], 31, CPU)])
def test_attention_is_that_of_each_document_alone(shape, window, documents):
    heads, shared, width, value_width = shape
    rows, length = len(documents.starts), documents.length
    torch.manual_seed(0)
    given = [
        torch.randn(rows, length, h, d)
        for h, d in ((heads, width), (shared, width), (shared, value_width))
    ]
    grad = torch.randn(rows, length, heads * value_width)
    ours, theirs = ([x.clone().requires_grad_() for x in given] for _ in range(2))
    out = attend(*ours, window=window, scale=0.3, documents=documents)
    wanted = alone(documents, *theirs, window=window, scale=0.3)
    out.backward(grad)
    wanted.backward(grad)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=2e-6)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_heads_keep_their_type(dtype):
    torch.manual_seed(0)
    given = [torch.randn(2, 12, 4, 8) for _ in range(3)]
    exact = attend(*given, window=None, documents=SHORT)
    halves = [x.to(dtype).requires_grad_() for x in given]
    out = attend(*halves, window=None, documents=SHORT)
    out.sum().backward()
    assert out.dtype is dtype and all(x.grad.dtype is dtype for x in halves)
    torch.testing.assert_close(out.float(), exact, rtol=0.02, atol=0.02)


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="FlashAttention's kernel for many lengths runs on CUDA"
)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [None, 20])
def test_one_call_for_all_lengths(shape, window):
    heads, shared, width, value_width = shape
    cuda = Documents(RAGGED.starts, 150, torch.device("cuda"))
    torch.manual_seed(0)
    given = [
        torch.randn(4, 150, h, d)
        for h, d in ((heads, width), (shared, width), (shared, value_width))
    ]
    grad = torch.randn(4, 150, heads * value_width)
    exact = [x.bfloat16().double().requires_grad_() for x in given]
    halves = [x.cuda().bfloat16().requires_grad_() for x in given]
    wanted = attend(*exact, window=window, documents=RAGGED)
    wanted.backward(grad.double())
    out = attend(*halves, window=window, documents=cuda)
    out.backward(grad.cuda().bfloat16())
    torch.testing.assert_close(out.cpu().double(), wanted, rtol=0.02, atol=0.02)
    for mine, other in zip(halves, exact, strict=True):
        torch.testing.assert_close(mine.grad.cpu().double(), other.grad, rtol=0.05, atol=0.05)


def test_dropped_attention_keeps_to_documents_too():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 12, 2, 4) for _ in range(3))
    result = []
    for first in (1.0, 5.0):
        v[0, 0] = first
        torch.manual_seed(1)
        result.append(attend(q, k, v, window=None, dropout=0.5, documents=SHORT))
    assert torch.equal(result[0][0, 2:], result[1][0, 2:]) and torch.equal(
        result[0][1], result[1][1]
    )
    assert not torch.equal(result[0][0, :2], result[1][0, :2])


TINY = {
    "layers": 2,
    "hidden": 32,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 48,
    "vocab": 64,
    "max_seq_len": 200,
}
MODELS = {
    "gqa with rope": {},
    "windowed": {"window": 7},
    "learned positions": {
        "position": "learned",
        "norm": "layernorm",
        "gated_mlp": False,
        "bias": "all",
    },
    "mla": {
        "attention": "mla",
        "mla": {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8},
    },
    "mfa": {"attention": "mfa", "mfa": {"qk_rank": 16, "head_dim": 8, "heads": 4}},
}


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
def test_a_decoder_sees_each_document_alone(changes):
    decoder = Decoder(ModelSpec(name="tiny", **{**TINY, **changes}))
    initialize(decoder, layers=2, seed=1)
    torch.manual_seed(2)
    tokens = torch.randint(64, (4, 150))
    logits = decoder(tokens, RAGGED)
    logits.square().mean().backward()
    assert all(p.grad is not None for p in decoder.parameters())
    for row, start, stop in (
        (0, 1, 5),
        (0, 5, 40),
        (0, 41, 150),
        (1, 0, 150),
        (2, 7, 8),
        (3, 70, 149),
    ):
        apart = decoder(tokens[row : row + 1, start:stop])
        torch.testing.assert_close(logits[row, start:stop], apart[0], rtol=1e-5, atol=1e-5)
    changed = tokens.clone()
    changed[0, 5:40] = 63 - changed[0, 5:40]
    others = torch.ones(4, 150, dtype=torch.bool)
    others[0, 5:40] = False
    again = decoder(changed, RAGGED)
    assert torch.equal(again[others], logits[others]), "one document does not affect another"
    assert not torch.equal(again[~others], logits[~others])


def test_calls_are_linear_in_what_is_seen():
    """Of a long sequence no piece is wider than its documents, or twice its window."""
    packed = Documents([list(range(0, 4000, 10))], 4000, CPU)
    _, result = packed.chunks(None)
    assert all(
        each.queries == each.keys and each.queries.stop - each.queries.start <= pieces.TILE
        for each in result
    )
    assert (
        sum(each.queries.stop - each.queries.start for each in result) == 4000
        and len(result) < 4000 / 50
    )
    _, windowed = Documents([[0, 3000]], 4000, CPU).chunks(64)
    assert sum(each.queries.stop - each.queries.start for each in windowed) == 4000
    assert max(each.keys.stop - each.keys.start for each in windowed) < 2 * 64


@pytest.mark.parametrize("starts", [[], [1], [0, 0], [0, 5, 3], [0, 12]])
def test_beginnings_that_are_none(starts):
    with pytest.raises(ValueError, match=r"of 12 positions\. Use 0 and ascending positions"):
        Documents([starts], 12, CPU)

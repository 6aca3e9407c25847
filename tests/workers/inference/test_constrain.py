"""Constrained output of an untrained model."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
import tokenizers

from tests.workers.inference.test_engine import finished, model_of
from tests.workers.inference.test_speculate import near, plain, speculating
from workers.inference.constrain.guide import Guides
from workers.inference.engine import Engine
from workers.inference.sampling.parameters import SamplingParams
from workers.inference.text.tokenizer import ByteTokenizer
from workers.models.text.tokenizer import TextTokenizer

BYTES = {"vocab": 258, "max_seq_len": 256}
END = 257
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "size": {"type": "integer", "minimum": 3, "maximum": 120},
        "kind": {"enum": ["oak", "ash"]},
        "leaves": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["name", "size", "kind"],
    "additionalProperties": False,
}


def guided(engine: Engine, ends: tuple[int, ...] = ()) -> Engine:
    engine.guides = Guides(ByteTokenizer(), ends, vocab=258)
    return engine


def params(seed: int, **more: Any) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 200, "seed": seed, "json_schema": SCHEMA, **more})


def test_answers_parse_and_validate_and_drafts_change_nothing():
    decoder = model_of(**BYTES)
    given = [([seed + 1, 7], params(seed, temperature=seed % 2)) for seed in range(6)]
    given.append(([3, 4], params(9, n=3)))
    alone = finished(guided(plain(model_of(**BYTES), blocks=500)), given)
    looked = finished(guided(speculating(model_of(**BYTES), None, blocks=500)), given)
    engine = guided(speculating(decoder, near(decoder, **BYTES), blocks=500))
    drafted = finished(engine, given)
    assert engine.counts.accepted > 0
    assert [each.output_tokens for each in looked] == [each.output_tokens for each in alone]
    for plainly, request in zip(alone, drafted, strict=True):
        assert request.finish == plainly.finish == "stop"
        jsonschema.validate(json.loads(bytes(request.output_tokens)), SCHEMA)
        assert not request.sampling.greedy or request.output_tokens == plainly.output_tokens


def test_an_end_token_comes_where_the_form_is_complete_and_nowhere_else():
    words = {"regex": r"[ab]{2,4}", "stop_token_ids": (END,)}
    given = [
        ([seed + 1], SamplingParams(max_new_tokens=9, seed=seed, **words)) for seed in range(12)
    ]
    for request in finished(guided(plain(model_of(**BYTES)), (END,)), given):
        text = bytes(each for each in request.output_tokens if each != END).decode()
        assert re.fullmatch("[ab]{2,4}", text) and request.finish == "stop"
    (request,) = finished(
        guided(plain(model_of(**BYTES))),
        [([5], SamplingParams(grammar='start: "x" | "yes" start', max_new_tokens=60, seed=2))],
    )
    assert (
        re.fullmatch("(yes)*x", bytes(request.output_tokens).decode()) or request.finish == "length"
    )


def test_a_models_own_tokenizer_joins_bytes_to_tokens():
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator(
        [json.dumps({"name": "oak", "size": n, "kind": "ash"}) for n in range(200)], 330
    )
    loaded = tokenizers.Tokenizer.from_str(trained.to_str())
    words = TextTokenizer("here", loaded.get_vocab_size(), None, (0,), None, {}, loaded)
    engine = plain(model_of(vocab=340, max_seq_len=256), blocks=300)
    engine.guides = Guides(words, (0,), vocab=340)
    for request in finished(
        engine, [([seed + 1], params(seed, stop_token_ids=(0,))) for seed in range(4)]
    ):
        jsonschema.validate(json.loads(words.decode(request.output_tokens)), SCHEMA)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (
            {"json_schema": {"type": "integer", "minimum": 5, "maximum": 3}},
            "json_schema cannot be met",
        ),
        ({"json_schema": {"type": "tree"}}, "json_schema cannot be met"),
        ({"json_schema": False}, "json_schema is false; it must be a JSON object"),
        ({"json_schema": "{"}, "json_schema is not JSON"),
        ({"regex": "(a"}, "regex cannot be met"),
        ({"regex": "((a?){60}){60}a{60}"}, "regex cannot be met: lexer error"),
        ({"regex": 7}, "regex is 7; it must be a string"),
        ({"grammar": "start: x"}, "grammar cannot be met"),
        ({"grammar": "start: /a/", "regex": "a"}, "regex and grammar are both set"),
    ],
)
def test_unsatisfiable_constraints_are_reported(form, message):
    engine = guided(plain(model_of(**BYTES)))
    with pytest.raises(ValueError, match=message):
        engine.add([1], SamplingParams(**form))
    assert not engine.busy
    engine.guides = None
    with pytest.raises(ValueError, match="require a tokenizer"):
        engine.add([1], SamplingParams(json_schema={}))


@pytest.mark.parametrize("form", [{"regex": ""}, {"grammar": "start:"}])
def test_an_answer_that_no_token_begins_is_refused(form):
    Guides(ByteTokenizer(), (END,), vocab=258).open(
        SamplingParams(**form)
    )  # an end is such a token
    with pytest.raises(
        ValueError, match="cannot be met: no token of this model begins such an answer"
    ):
        Guides(ByteTokenizer(), (), vocab=256).open(SamplingParams(**form))

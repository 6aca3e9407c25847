"""Producing data from a stub OpenAI server: filters, resuming, lost and nonsensical servers."""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from workers.contracts.examples.formats import parse_line
from workers.contracts.specs.finetuning.produce import FilterSpec, ProduceBody
from workers.inference.control import StopControl
from workers.metrics.recorder import Recorder
from workers.posttraining.produce import main as command
from workers.posttraining.produce.client import TRIES, ChatClient, ServerLost
from workers.posttraining.produce.filters import Filters
from workers.posttraining.produce.run import Producer
from workers.posttraining.produce.scores import Candidate
from workers.posttraining.produce.similarity import Pool, rouge_l, words
from workers.runtime.exit_codes import Outcome, UserError

Reply = Callable[[str], Any]


class Stub:
    """A server whose `reply` maps the last message to a text, a status, or any JSON."""

    def __init__(self) -> None:
        self.reply: Reply = lambda text: f"answer to {text[-60:]}"
        self.requests: list[str] = []
        self.bodies: list[tuple[str, dict[str, Any]]] = []
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                text = body["messages"][-1]["content"]
                stub.requests.append(text)
                stub.bodies.append((self.path, body))
                made = stub.reply(text)
                status = made if isinstance(made, int) else 200
                message: Any = {
                    "choices": [{"message": {"content": made}, "finish_reason": "stop"}],
                    "usage": {"prompt_tokens": 7, "completion_tokens": 3},
                }
                if not isinstance(made, str):
                    message = made if isinstance(made, dict) else {"odd": 1}
                data = json.dumps(message).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"


@pytest.fixture
def stub() -> Iterator[Stub]:
    made = Stub()
    yield made
    made.server.shutdown()
    made.server.server_close()


def make_body(stub: Stub, folder: Path, prompts: int = 6, **more: Any) -> ProduceBody:
    seeds = folder / "seeds.jsonl"
    seeds.write_text("".join(f'{{"prompt": "Count to {n}"}}\n' for n in range(prompts)))
    body = {
        "tasks": ["open_qa"],
        "seeds": str(seeds),
        "method": "answer",
        "count": 6,
        "filters": [],
        "server": {"url": stub.url, "model": "tiny"},
        "concurrency": 2,
    }
    return ProduceBody.from_dict({**body, **more})


def produce(body: ProduceBody, folder: Path) -> Outcome:
    recorder = Recorder(folder / "rank-0", run="1", attempt=1, rank=0)
    client = ChatClient(body.server, wait=lambda seconds: None)
    judge = ChatClient(body.judge or body.server, field="produce.judge", wait=lambda seconds: None)
    try:
        with StopControl(folder, folder / "rank-0") as control:
            return Producer(body, client, judge, recorder, control).run(folder / "out.jsonl")
    finally:
        client.close()
        judge.close()
        recorder.close()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def points(folder: Path) -> dict[str, float]:
    last = lines(folder / "rank-0" / "points.jsonl")[-1]
    values: dict[str, float] = last["values"]
    return values


def candidate(prompt: str, answer: str, *, cut: bool = False, expected: str = "") -> Candidate:
    turns = ({"role": "user", "content": prompt}, {"role": "assistant", "content": answer})
    return Candidate(turns, cut=cut, expected=expected)


def test_lines_are_examples_with_provenance(stub: Stub, tmp_path: Path) -> None:
    outcome = produce(make_body(stub, tmp_path), tmp_path)
    assert (outcome.exit_class, outcome.reason) == ("ok", "6 lines; rejected: none")
    made = lines(tmp_path / "out.jsonl")
    assert [line["provenance"]["seed_line"] for line in made] == [1, 2, 3, 4, 5, 6]
    assert made[0]["task_type"] == "open_qa" and made[0]["provenance"]["model"] == "tiny"
    assert parse_line(json.dumps(made[0]), "messages").shape == "answers"
    origin = made[0]["provenance"]
    assert origin["seed_prompt"] == "Count to 0" and origin["server"] == stub.url
    assert origin["sampling"] | {"seed": 0} == {
        "temperature": 0.9,
        "top_p": 1.0,
        "max_new_tokens": 512,
        "seed": 0,
    }
    values = points(tmp_path)
    assert values["produce/prompt_tokens"] == 42 and values["produce/completion_tokens"] == 18
    assert values["produce/candidates"] == values["produce/accepted"] == 6


def test_a_killed_run_repeats_and_loses_no_line(stub: Stub, tmp_path: Path) -> None:
    body = make_body(stub, tmp_path)
    whole = produce(body, tmp_path)
    expected = (tmp_path / "out.jsonl").read_bytes()
    cut = expected.split(b"\n")
    (tmp_path / "out.jsonl").write_bytes(b"\n".join(cut[:3]) + b"\n" + cut[3][:20])
    stub.requests.clear()
    again = produce(body, tmp_path)
    assert (tmp_path / "out.jsonl").read_bytes() == expected and again.step == whole.step
    assert len(stub.requests) == 3, "the lines that are there are not made again"
    with pytest.raises(UserError, match="lines of another spec"):
        produce(body.model_copy(update={"temperature": 0.1}), tmp_path)


def test_best_of_n_writes_the_answer_with_the_highest_score(stub: Stub, tmp_path: Path) -> None:
    answers = iter(["bad", "good", "worse"] * 9)
    scores = {"bad": "3", "good": "Score: 9", "worse": "1"}
    stub.reply = lambda text: (
        scores[text.rsplit("Answer: ", 1)[1]] if "Answer: " in text else next(answers)
    )
    body = make_body(
        stub, tmp_path, prompts=2, method="best_of_n", samples=3, count=2, concurrency=1
    )
    produce(body, tmp_path)
    made = lines(tmp_path / "out.jsonl")
    assert [line["messages"][-1]["content"] for line in made] == ["good", "good"]
    origin = made[0]["provenance"]
    assert origin["score"] == 9.0 and origin["candidate_scores"] == [3.0, 9.0, 1.0]


def test_best_and_worst_answers_are_pairs_and_ties_are_rejected(stub: Stub, tmp_path: Path) -> None:
    answers = iter(["4", "five", "about 7 or 4"] + ["1", "2"] * 9)
    stub.reply = lambda text: next(answers)
    seeds = tmp_path / "known.jsonl"
    seeds.write_text(
        '{"prompt": "2+2=", "answer": 4}\n{"prompt": "3+3=", "answer": "6", "task_type": "math"}\n'
    )
    body = make_body(
        stub,
        tmp_path,
        method="best_of_n",
        seeds=str(seeds),
        samples=3,
        count=2,
        concurrency=1,
        score={"kind": "number"},
        writes="preference",
    )
    assert produce(body, tmp_path).reason == (
        "1 lines of 2: the seeds are used up; rejected: tie 1"
    )
    [pair] = lines(tmp_path / "out.jsonl")
    assert (pair["chosen"][0]["content"], pair["rejected"][0]["content"]) == ("4", "five")
    assert parse_line(json.dumps(pair), "preference").shape == "pairs"
    [tie] = lines(tmp_path / "out.rejected.jsonl")
    assert tie["provenance"]["detail"] == "all accepted answers have the score 0"


def test_a_reward_model_scores_answers(stub: Stub, tmp_path: Path) -> None:
    stub.reply = lambda text: {"data": [{"data": [-float(len(text))]}]}
    judge = stub.url.replace("/v1", "/v1/")
    other = Stub()
    long_short = iter(["a long answer", "short", "middle one"] * 2)
    other.reply = lambda text: next(long_short)
    body = make_body(
        other,
        tmp_path,
        prompts=1,
        method="best_of_n",
        samples=3,
        count=1,
        concurrency=1,
        score={"kind": "reward"},
        judge={"url": judge, "model": "rm"},
    )
    produce(body, tmp_path)
    other.server.shutdown()
    other.server.server_close()
    [made] = lines(tmp_path / "out.jsonl")
    assert made["messages"][-1]["content"] == "short"
    assert made["provenance"]["score"] == -5.0 and stub.bodies[0][0] == "/pooling"


@pytest.mark.parametrize("method", ["self_instruct", "evol"])
def test_new_instructions_are_answered_and_repeats_rejected(
    stub: Stub, tmp_path: Path, method: str
) -> None:
    made = iter(["Name a river in Asia", "Name a river in Asia", "Explain how bees find food"])
    stub.reply = lambda text: (
        next(made) if "instruction only" in text or "new instruction" in text else "Fine."
    )
    body = make_body(
        stub, tmp_path, method=method, count=2, filters=[{"kind": "rouge_l"}], concurrency=1
    )
    outcome = produce(body, tmp_path)
    assert outcome.reason == "2 lines; rejected: rouge_l 1"
    [rejected] = lines(tmp_path / "out.rejected.jsonl")
    origin = rejected["provenance"]
    assert origin["rejected_by"] == "rouge_l" and origin["scores"]["rouge_l"] == 1.0
    assert origin["detail"] == "ROUGE-L 1.00 with unit 0, at most 0.7"
    assert points(tmp_path)["produce/filtered/rouge_l"] == 1
    if method == "evol":
        assert origin["steps"][0]["operation"] == "reasoning"
    else:
        assert origin["examples"][0].startswith("seed ")


def test_evolutions_and_dialogues_have_several_steps(stub: Stub, tmp_path: Path) -> None:
    number = iter(range(100))
    stub.reply = lambda text: f"text {next(number)}"
    body = make_body(
        stub,
        tmp_path,
        tasks=["dialogue"],
        method="evol",
        rounds=3,
        turns=3,
        system="Be brief.",
        count=1,
        concurrency=1,
    )
    produce(body, tmp_path)
    [made] = lines(tmp_path / "out.jsonl")
    assert [step["operation"] for step in made["provenance"]["steps"]] == [
        "add_constraint",
        "reasoning",
        "concretize",
    ]
    roles = [each["role"] for each in made["messages"]]
    assert roles == ["system", *["user", "assistant"] * 3]
    assert made["messages"][1]["content"] == "text 2"


def test_an_instruction_that_stays_the_same_is_rejected(stub: Stub, tmp_path: Path) -> None:
    made = iter(["Count to 0", "Count to ten in Latin", "unus, duo"])
    stub.reply = lambda text: next(made)
    body = make_body(stub, tmp_path, method="evol", count=1, concurrency=1)
    assert produce(body, tmp_path).reason == "1 lines; rejected: unchanged 1"


def test_the_address_of_a_run_comes_from_the_environment(
    stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = make_body(stub, tmp_path, server={"run": 7}, output=str(tmp_path / "made.jsonl"))
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps({"kind": "produce", "produce": body.to_dict()}))
    arguments = ["--spec", str(spec), "--dir", str(tmp_path / "run")]
    assert command.main(arguments) == 64, "no address"
    known = {"7": {"url": stub.url, "model": "served", "headers": {"x-orrery-key": "k"}}}
    monkeypatch.setenv("ORRERY_SERVERS", json.dumps(known))
    monkeypatch.setattr("workers.posttraining.produce.client.TRIES", 1)
    replies = iter(["one", 404])  # another program has the port now
    stub.reply = lambda text: next(replies, 404)
    assert command.main(arguments) == 67, "lost after an answer: the next attempt finds it again"
    stub.reply = lambda text: 503
    assert command.main(arguments) == 69, "it never answered: the retry budget counts"
    stub.reply = lambda text: "fine"
    assert command.main(arguments) == 0
    made = lines(tmp_path / "made.jsonl")
    assert len(made) == 6 and made[0]["provenance"]["server"] == "run 7"
    assert made[0]["provenance"]["model"] == "served"


def test_seed_lines_that_are_none_are_listed(stub: Stub, tmp_path: Path) -> None:
    seeds = tmp_path / "odd.jsonl"
    seeds.write_text('{"prompt": "fine"}\n{"text": 1}\n\n[\n{"prompt": "x", "task_type": "poem"}\n')
    message = "line 2 has no prompt; line 4 is not JSON.*; line 5 has the unknown task_type 'poem'"
    with pytest.raises(UserError, match=message):
        produce(make_body(stub, tmp_path, seeds=str(seeds)), tmp_path)


def test_a_judge_without_scores_rejects_and_then_ends_the_run(stub: Stub, tmp_path: Path) -> None:
    stub.reply = lambda text: "great!" if "Rate how" in text else "an answer"
    body = make_body(
        stub, tmp_path, prompts=12, count=12, filters=[{"kind": "judge"}], concurrency=1
    )
    with pytest.raises(UserError, match="tiny gave no score from 0 to 10 for 10 answers in a row"):
        produce(body, tmp_path)
    rejected = lines(tmp_path / "out.rejected.jsonl")
    assert rejected[0]["provenance"]["detail"] == "the judge gave no score"


def test_a_server_that_goes_away_or_answers_nonsense_ends_the_run(
    stub: Stub, tmp_path: Path
) -> None:
    stub.reply = lambda text: 503
    with pytest.raises(ServerLost, match=f"in {TRIES} tries; the last: status 503"):
        produce(make_body(stub, tmp_path, concurrency=1), tmp_path)
    assert len(stub.requests) == TRIES
    stub.reply = lambda text: None
    with pytest.raises(ServerLost, match="no chat completion"):
        produce(make_body(stub, tmp_path), tmp_path)
    stub.reply = lambda text: 401
    with pytest.raises(UserError, match="refuses with 401"):
        produce(make_body(stub, tmp_path), tmp_path)


def test_filters_that_reject_everything_end_the_run(stub: Stub, tmp_path: Path) -> None:
    body = make_body(stub, tmp_path, method="evol", filters=[{"kind": "regex", "pattern": "^$"}])
    with pytest.raises(UserError, match="0 of 200 candidates were accepted"):
        produce(body, tmp_path)


@pytest.mark.parametrize(
    ("spec", "good", "bad"),
    [
        ({"kind": "length", "max_chars": 5}, "short", "longer"),
        ({"kind": "refusal"}, "I can do that.", "I'm sorry, but I can't."),
        ({"kind": "language"}, "Plain English, 5 words", "Это по-русски"),
        ({"kind": "regex", "pattern": r"\b42\b"}, "It is 42.", "It is 421."),
        ({"kind": "judge", "threshold": 5}, "ninety", "x"),
        ({"kind": "reward", "threshold": -2}, "ninety", ""),
    ],
)
def test_each_filter_rejects_by_its_rule(spec: dict[str, Any], good: str, bad: str) -> None:
    def score(spec: FilterSpec, each: Candidate) -> float:
        if spec.kind == "regex":
            return float(re.search(str(spec.pattern), each.answer) is not None)
        return len(each.answer) - (3 if spec.kind == "reward" else 0)

    filters = Filters([FilterSpec.from_dict(spec)], score=score)
    assert filters.verdict(candidate("p", good)).rejected_by is None
    verdict = filters.verdict(candidate("p", bad))
    assert verdict.rejected_by == spec["kind"] and verdict.detail


def test_an_answer_that_was_cut_is_rejected() -> None:
    filters = Filters([FilterSpec(kind="complete")], score=lambda spec, each: 0.0)
    assert filters.verdict(candidate("p", "whole")).rejected_by is None
    assert filters.verdict(candidate("p", "who", cut=True)).rejected_by == "complete"


def test_the_pool_finds_the_same_texts_as_a_comparison_with_each() -> None:
    chance = random.Random(1)
    texts = [" ".join(chance.choices(["a", "b", "c", "d", "e", "f"], k=8)) for _ in range(60)]
    pool = Pool()
    for number, text in enumerate(texts):
        scores = [rouge_l(words(text), words(other)) for other in texts[:number]]
        nearest = pool.nearest(text, above=0.7)
        assert (nearest is not None) == (max(scores, default=0.0) > 0.7)
        if nearest is not None:
            assert nearest.score == pytest.approx(scores[int(nearest.name)])
        pool.add(text, str(number))


def test_lines_of_an_evaluation_set_are_rejected(tmp_path: Path) -> None:
    held = tmp_path / "held.jsonl"
    held.write_text('{"question": "What is the capital of France today?"}\n')
    spec = FilterSpec(kind="ngram", n=5, against=str(held))
    filters = Filters([spec], score=lambda spec, each: 0.0)
    verdict = filters.verdict(candidate("Question: what is the Capital of France?", "x"))
    assert verdict.detail in (
        "5 words of held.jsonl: is the capital of france",
        "5 words of held.jsonl: what is the capital of",
    )
    assert filters.verdict(candidate("What is the tallest hill of France?", "x")).detail == ""
    for path, message in ((tmp_path / "gone", "cannot be read"), (held, "could reject nothing")):
        with pytest.raises(UserError, match=message):
            Filters(
                [FilterSpec(kind="ngram", n=50, against=str(path))], score=lambda spec, each: 0.0
            )


def test_the_example_runs(stub: Stub, tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    document = json.loads((root / "examples" / "produce.json").read_text())
    document["produce"] |= {
        "server": {"url": stub.url, "model": "tiny"},
        "seeds": str(root / document["produce"]["seeds"]),
        "output": str(tmp_path / "made.jsonl"),
    }
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps(document))
    assert command.main(["--spec", str(spec), "--dir", str(tmp_path / "run")]) == 0
    assert len(lines(tmp_path / "made.jsonl")) == document["produce"]["count"]


def test_the_command_runs_a_spec(stub: Stub, tmp_path: Path) -> None:
    body = make_body(stub, tmp_path, output=str(tmp_path / "made.jsonl"))
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps({"kind": "produce", "produce": body.to_dict()}))
    assert command.main(["--spec", str(spec), "--dir", str(tmp_path / "run")]) == 0
    assert len(lines(tmp_path / "made.jsonl")) == 6

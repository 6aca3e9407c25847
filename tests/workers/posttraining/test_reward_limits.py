"""Limits of rewards and of their log: slow patterns, slow judges, a file that grows."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from workers.contracts.specs.finetuning.reinforcement import GrpoBody
from workers.posttraining.reinforcement.rewards.build import build_rewards
from workers.posttraining.reinforcement.rewards.reward import AnswerToScore
from workers.posttraining.reinforcement.rollout_log import RolloutLog
from workers.posttraining.reinforcement.rollouts import Rollout

HOSTILE = "a" * 60 + "b"


def reward_of(spec, **options):
    return build_rewards(GrpoBody.from_dict({"rewards": [spec]}), **options)[0]


def score(reward, *texts):
    return reward.score([AnswerToScore("", text, None, "line 1") for text in texts])


@pytest.mark.parametrize(
    ("spec", "hostile", "good"),
    [
        ({"kind": "regex", "pattern": r"(a+)+$"}, HOSTILE, "aaa"),
        (
            {"kind": "json_schema", "schema": {"type": "string", "pattern": "^(a+)+$"}},
            json.dumps(HOSTILE),
            '"aaa"',
        ),
    ],
    ids=["regex", "json_schema"],
)
def test_a_pattern_of_exponential_time_is_a_failure_of_that_answer(
    monkeypatch, spec, hostile, good
):
    from workers.posttraining.reinforcement.rewards import pattern

    monkeypatch.setattr(pattern, "LIMIT_S", 0.5)
    reward = reward_of(spec)
    try:
        first, second, third = score(reward, good, hostile, good)
        assert (first.value, first.failure) == (third.value, third.failure) == (1.0, "")
        assert "gave no result within 0.5 s" in second.failure
        # after three of a batch the others are not tried
        scores = score(reward, hostile, hostile, hostile, good)
        assert all(each.failure for each in scores)
        assert score(reward, good)[0].value == 1.0
    finally:
        reward.close()


def test_a_judge_slower_than_its_limit_is_a_failure():
    release = threading.Event()

    class Slow(BaseHTTPRequestHandler):
        def do_POST(self):
            release.wait(20)

        def log_message(self, *args):
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    spec = {"kind": "judge", "url": url, "model": "m", "prompt": "rate {answer}"}
    reward = reward_of(spec, judge_s=0.5)
    try:
        scores = score(reward, "a", "b")
        assert all("did not score 2 answers within 0.5 s" in each.failure for each in scores)
    finally:
        release.set()
        reward.close()
        server.shutdown()
        server.server_close()
        server.server_close()


def test_the_log_of_rollouts_is_bounded_and_names_the_gap(tmp_path):
    log = RolloutLog(tmp_path, limit=6000)
    for step in range(40):
        log.append([Rollout(step, 0, n, [1], [2], [-0.5], 0, text="x" * 100) for n in range(2)])
    assert log.path.stat().st_size <= 6000
    first, *lines = map(json.loads, log.path.read_text().splitlines())
    steps = [each["step"] for each in lines]
    # complete iterations without a hole, up to the last one
    assert steps == [step for step in range(steps[0], 40) for _ in range(2)]
    gap = first["gap"]
    assert (gap["first_step"], gap["last_step"]) == (0, steps[0] - 1)
    assert gap["answers"] + len(lines) == 80
    assert RolloutLog(tmp_path).last_step == 39

"""Problems of a request as text."""

from __future__ import annotations

from workers.contracts.base import Problem, as_sentences


def test_problems_become_sentences() -> None:
    first = Problem(field="tp", message="3 does not divide 8 heads", hint="Use tp 2.")
    second = Problem(field="", message="the plan is empty")
    assert as_sentences([first]) == "tp: 3 does not divide 8 heads. Use tp 2."
    assert as_sentences([first, second], most=1).endswith("Use tp 2. 1 more problem.")
    assert as_sentences([second] * 5).endswith("the plan is empty. 2 more problems.")

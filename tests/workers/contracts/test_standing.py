"""Who keeps the others waiting: by life, by collectives entered, by marks; and when nobody can be
told.
"""

from __future__ import annotations

from typing import Any

import pytest

from workers.contracts.wire.rank_progress import Standing, culprits_sentence, judge


def ranks(*differ: dict[str, Any]) -> list[Standing]:
    """Four ranks in the same place, but for what is given by rank."""
    usual = {
        "step": 9,
        "phase": "update",
        "idle_s": 12.0,
        "marks": 50,
        "node": "a",
        "calls": {"all": 30, "0:1": 7},
    }
    found = [Standing(rank=rank, **usual) for rank in range(4)]  # type: ignore[arg-type]
    for change in differ:
        found[change["rank"]] = Standing(**{**usual, **change})
    return found


@pytest.mark.parametrize(
    ("differ", "behind", "message"),
    [
        (
            [{"rank": 2, "stopped": True, "phase": "forward"}],
            [2],
            "rank 2 on node a (stage 0) is stopped, in forward",
        ),
        ([{"rank": 1, "beat_s": 9.0}], [1], "no sign of life"),
        ([{"rank": 3, "calls": {"all": 29, "0:1": 7}}], [3], "has not come to the collective"),
        # 2 waits for 3 in their own group, 0 and 1 wait for both in everybody's
        (
            [
                {"rank": 2, "calls": {"all": 29, "2:3": 8}},
                {"rank": 3, "calls": {"all": 29, "2:3": 7}},
            ],
            [3],
            "3 ranks wait for it",
        ),
        ([{"rank": 0, "marks": 48, "phase": "record"}], [0], "has not come as far"),
        ([], [], "stand at the same place"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_rank_that_the_others_wait_for(
    differ: list[dict[str, Any]], behind: list[int], message: str
) -> None:
    found = judge(ranks(*differ))
    assert [each.rank for each in found.behind] == behind
    assert len(found.waiting) == 4 - len(behind)
    assert message in culprits_sentence(found)
    again = [Standing.from_dict(each.to_dict()) for each in ranks(*differ)]
    assert [each.rank for each in judge(again).behind] == behind, "the same from what travels"


def test_stages_make_marks_of_their_own() -> None:
    standings = ranks({"rank": 2, "stage": 1, "marks": 44}, {"rank": 3, "stage": 1, "marks": 44})
    assert judge(standings).behind == ()

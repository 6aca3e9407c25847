"""Which ranks keep the others waiting: by beats, by collectives entered, by marks, or unknown."""

from __future__ import annotations

from typing import Any

import pytest

from workers.contracts.wire.rank_progress import RankProgress, describe_culprits, diagnose_stall


def ranks(*differ: dict[str, Any]) -> list[RankProgress]:
    """Four ranks with the same progress, except for the fields given by rank."""
    usual = {
        "step": 9,
        "phase": "update",
        "idle_s": 12.0,
        "marks": 50,
        "node": "a",
        "calls": {"all": 30, "0:1": 7},
    }
    progress = [RankProgress(rank=rank, **usual) for rank in range(4)]  # type: ignore[arg-type]
    for change in differ:
        progress[change["rank"]] = RankProgress(**{**usual, **change})
    return progress


@pytest.mark.parametrize(
    ("differ", "behind", "message"),
    [
        (
            [{"rank": 2, "stopped": True, "phase": "forward"}],
            [2],
            "rank 2 on node a (stage 0) is stopped, in forward",
        ),
        ([{"rank": 1, "beat_s": 9.0}], [1], "no sign of life"),
        ([{"rank": 3, "calls": {"all": 29, "0:1": 7}}], [3], "has not entered the collective"),
        # 2 waits for 3 in their own group, 0 and 1 wait for both in the group of all
        (
            [
                {"rank": 2, "calls": {"all": 29, "2:3": 8}},
                {"rank": 3, "calls": {"all": 29, "2:3": 7}},
            ],
            [3],
            "3 ranks wait for it",
        ),
        ([{"rank": 0, "marks": 48, "phase": "record"}], [0], "has made less progress"),
        ([], [], "made the same progress"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_rank_that_the_others_wait_for(
    differ: list[dict[str, Any]], behind: list[int], message: str
) -> None:
    diagnosis = diagnose_stall(ranks(*differ))
    assert [rank.rank for rank in diagnosis.behind] == behind
    assert len(diagnosis.waiting) == 4 - len(behind)
    assert message in describe_culprits(diagnosis)
    again = [RankProgress.from_dict(rank.to_dict()) for rank in ranks(*differ)]
    assert [rank.rank for rank in diagnose_stall(again).behind] == behind, (
        "the same after serialization"
    )


def test_stages_make_marks_of_their_own() -> None:
    progress = ranks({"rank": 2, "stage": 1, "marks": 44}, {"rank": 3, "stage": 1, "marks": 44})
    assert diagnose_stall(progress).behind == ()

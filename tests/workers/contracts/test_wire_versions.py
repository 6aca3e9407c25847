"""The rule how far versions may differ, at its boundaries, and messages for an earlier version."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any

import pytest

from workers.contracts.base import WireContract
from workers.contracts.wire import versions
from workers.contracts.wire.field_versions import Since, message_for
from workers.contracts.wire.versions import PeerVersion, Skew, WireVersion, judge, parse_wire, skew

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ((1, 1), (1, 1), Skew.SAME),
        ((1, 1), (1, 0), Skew.MINOR),
        ((1, 1), (1, 2), Skew.MINOR),
        ((1, 1), (1, 3), Skew.REFUSED),
        ((1, 2), (1, 0), Skew.REFUSED),
        ((1, 1), (2, 1), Skew.REFUSED),
        ((1, 1), (0, 1), Skew.REFUSED),
        ((1, 9), (2, 0), Skew.REFUSED),
        ((1, 1), None, Skew.REFUSED),
        (None, None, Skew.REFUSED),
    ],
)
def test_one_minor_version_of_difference_works(one: Any, other: Any, expected: Skew) -> None:
    pair = [None if each is None else WireVersion(*each) for each in (one, other)]
    assert skew(*pair) is expected and skew(*reversed(pair)) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1.0", (1, 0)),
        ("0.0", (0, 0)),
        ("12.345", (12, 345)),
        *[(bad, None) for bad in ("", "1", "1.", ".1", "1.0.0", "01.1", "1.01", "-1.0", " 1.0")],
        *[(bad, None) for bad in ("1.0\n", "a.b", "1234567.0", "١.٠", None, 1.1, 2, True)],
    ],
)
def test_only_major_dot_minor_is_a_version(text: object, expected: Any) -> None:
    assert parse_wire(text) == expected


def test_a_side_without_versions_is_of_the_first_release() -> None:
    for wire in (None, ""):
        assert versions.parse_peer("ignored", wire) == PeerVersion("0.1", WireVersion(1, 0))
    assert versions.parse_peer("9", "nonsense").wire is None
    assert versions.parse_peer(None, "1.1") == PeerVersion("", WireVersion(1, 1))
    assert len(versions.parse_peer("x" * 99, "1.1").release) == 40


def test_the_sentence_names_both_versions_and_which_side_to_upgrade() -> None:
    own = PeerVersion("0.3", WireVersion(1, 2))
    assert judge(PeerVersion("0.3", WireVersion(1, 2)), name="node a", own=own) == (
        Skew.SAME,
        "",
        "",
    )
    older = judge(PeerVersion("0.1", WireVersion(1, 0)), name="node a", own=own)
    assert older.message == (
        "Node a runs release 0.1 (wire protocol 1.0), the control plane release 0.3 "
        "(wire protocol 1.2)."
    )
    assert older.skew is Skew.REFUSED and "Upgrade node a," in older.hint
    newer = judge(PeerVersion("0.4", WireVersion(1, 3)), name="node a", own=own)
    assert newer.skew is Skew.MINOR and "Upgrade the control plane next" in newer.hint
    unreadable = judge(PeerVersion("", None), name="node a", own=own)
    assert "release unknown (wire protocol unreadable)" in unreadable.message
    assert unreadable.skew is Skew.REFUSED and (ROOT / versions.DOCUMENT).is_file()


def test_the_release_is_that_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == versions.RELEASE


class Inner(WireContract):
    first: int = 0
    added: Annotated[int | None, Since(1, 2)] = None


class Outer(WireContract):
    first: int = 0
    added: Annotated[list[int], Since(1, 1)] = []
    inner: Inner = Inner()
    rows: list[Inner] = []


@pytest.mark.parametrize(
    ("peer", "expected"),
    [
        ((1, 0), {"first": 1, "inner": {"first": 2}, "rows": [{"first": 3}]}),
        ((1, 1), {"first": 1, "added": [5], "inner": {"first": 2}, "rows": [{"first": 3}]}),
        (
            (1, 2),
            {
                "first": 1,
                "added": [5],
                "inner": {"first": 2, "added": 6},
                "rows": [{"first": 3, "added": 7}],
            },
        ),
    ],
)
def test_a_message_has_only_the_fields_that_its_receiver_knows(peer: Any, expected: Any) -> None:
    message = Outer(
        first=1, added=[5], inner=Inner(first=2, added=6), rows=[Inner(first=3, added=7)]
    )
    assert message_for(message, WireVersion(*peer)) == expected
    assert message.added == [5], "the message itself is not changed"

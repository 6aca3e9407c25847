"""Parts that all users share: costly ones are cached for a while, cheap ones are not."""

from __future__ import annotations

import threading

import pytest

from webui import shared_parts
from webui.shared_parts import SharedByKey, SharedPart


def test_only_a_costly_part_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    results = iter(range(9))
    part = SharedPart(lambda: next(results))
    assert [part.get(), part.get()] == [0, 1]
    monkeypatch.setattr(shared_parts, "FREE_S", -1.0)
    monkeypatch.setattr(shared_parts, "TIMES", 1e9)
    assert [part.get(), part.get()] == [2, 2]


def test_requests_get_the_old_result_while_one_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_parts, "FREE_S", -1.0)
    monkeypatch.setattr(shared_parts, "TIMES", 0)
    computing, proceed = threading.Event(), threading.Event()
    results = iter(["old", "new"])

    def compute() -> str:
        result = next(results)
        if result == "new":
            computing.set()
            assert proceed.wait(30)
        return result

    part = SharedPart(compute)
    assert part.get() == "old"
    part._newest._stored = (0.0, "old")
    other = threading.Thread(target=part.get)
    other.start()
    assert computing.wait(30)
    assert part.get() == "old"
    proceed.set()
    other.join()
    assert part._newest._stored[1] == "new"


def test_an_error_is_not_cached() -> None:
    outcomes = iter([ValueError, None])

    def compute() -> int:
        if (error := next(outcomes)) is not None:
            raise error
        return 7

    part = SharedPart(compute)
    with pytest.raises(ValueError):
        part.get()
    assert part.get() == 7


def test_keys_are_separate_and_the_oldest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_parts, "FREE_S", -1.0)
    monkeypatch.setattr(shared_parts, "TIMES", 1e9)
    monkeypatch.setattr(shared_parts, "KEYS", 2)
    parts: SharedByKey[str, str] = SharedByKey()
    assert parts.get("a", lambda: "first") == "first"
    assert parts.get("b", lambda: "other") == "other"
    assert parts.get("a", lambda: "second") == "first"
    parts.get("c", lambda: "")
    assert parts.get("a", lambda: "second") == "first"
    assert parts.get("b", lambda: "again") == "again"

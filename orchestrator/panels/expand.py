"""The panels that a pattern makes: one per metric or medium whose name it matches."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Collection
from dataclasses import dataclass

from orchestrator.common.errors import Refusal, invalid
from orchestrator.panels.data import Empty
from orchestrator.panels.pattern import PatternError, matches
from orchestrator.panels.spec import MOST_MATCHES, Kind, PanelSpec, RunsSource
from orchestrator.panels.viewed_runs import PanelViewer


@dataclass(frozen=True, slots=True)
class Expansion:
    """The panels of one specification; `left_out` counts matches above the limit."""

    panels: tuple[PanelSpec, ...]
    matches: int = 0
    left_out: int = 0
    empty: Empty | None = None


def expand(panel: PanelSpec, viewer: PanelViewer) -> Expansion:
    """One panel per name that the pattern matches in the runs that the viewer sees.

    A panel without a pattern, or that combines matches, stays as it is. A made panel has the id
    `ID-DIGEST`, the same each time.
    """
    if not panel.pattern or panel.combine or panel.kind == "markdown":
        return Expansion((panel,))
    viewed = viewer.runs(panel)
    if viewed.empty is not None:
        return Expansion((panel,), empty=viewed.empty)
    names, left_out, empty = matching(panel, viewer)
    if empty is not None:
        return Expansion((panel,), empty=empty)
    made = tuple(_made(panel, name) for name in names)
    return Expansion(made, len(made) + left_out, left_out)


def matching(panel: PanelSpec, viewer: PanelViewer) -> tuple[list[str], int, Empty | None]:
    """Names that a panel's pattern matches, how many more there are, and why there are none."""
    try:
        names = matches(panel.pattern, viewer.names(panel))
    except PatternError as error:
        return [], 0, Empty("no_match", panel.pattern, detail=error.message)
    if not names:
        return [], 0, Empty("no_match", panel.pattern)
    return names[:MOST_MATCHES], max(0, len(names) - MOST_MATCHES), None


def search_names(
    *, viewer: PanelViewer, kind: Kind, source: RunsSource | None, pattern: str = ""
) -> list[str]:
    """Names that a panel of a kind can show of a source's runs, those that the pattern matches.

    Raises Refusal 422 with the position of what is wrong in the pattern.
    """
    names = viewer.names_of_source(source, kind)
    if not pattern:
        return names
    try:
        return matches(pattern, names)
    except PatternError as error:
        raise pattern_refusal(pattern, error) from None


def pattern_refusal(pattern: str, error: PatternError, field: str = "pattern") -> Refusal:
    """The 422 of a pattern that cannot be read: its text with a caret below the position."""
    refusal = invalid(field, f"at character {error.at + 1}: {error.message}", error.hint)
    advice = f" {error.hint}" if error.hint else ""
    refusal.detail = f"{error.message}.{advice}\n{pattern}\n{' ' * error.at}^"
    return refusal


def nearest(name: str, names: Collection[str]) -> str:
    """The known name that is most like this one; or empty."""
    # difflib compares slowly: names of another length are not alike
    likely = [each for each in names if abs(len(each) - len(name)) <= 3][:1000]
    return next(iter(difflib.get_close_matches(name, likely, 1, 0.7)), "")


def _made(panel: PanelSpec, name: str) -> PanelSpec:
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    title = f"{panel.title}: {name}"[:200] if panel.title else ""
    changes = {"id": f"{panel.id[:31]}-{digest}", "metrics": [name], "pattern": "", "title": title}
    return panel.model_copy(update=changes)

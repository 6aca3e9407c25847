"""The stored JSON of a dashboard: its panels in their order. Does not depend on Django."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any, Final, Self

from pydantic import Field, model_validator

from orchestrator.panels.spec import VERSION, PanelSpec, RunsSource
from workers.contracts.base import Contract, Refused

MOST_PANELS: Final = 100
MOST_PATTERNS: Final = 20  # panels with a pattern


class DashboardSpec(Contract):
    """Panels in the order of the page; pinned ones are shown first."""

    version: Annotated[int, Field(ge=VERSION, le=VERSION, description="of this format")] = VERSION
    panels: list[PanelSpec] = []
    runs: Annotated[
        RunsSource | None,
        Field(description="runs of panels that name none; default: those of its subject"),
    ] = None

    @model_validator(mode="after")
    def _limited(self) -> Self:
        if len(self.panels) > MOST_PANELS:
            message = f"a dashboard has at most {MOST_PANELS} panels, not {len(self.panels)}"
            raise Refused(message, "Create a second dashboard.", field="panels")
        patterns = sum(bool(panel.pattern) for panel in self.panels)
        if patterns > MOST_PATTERNS:
            message = f"{patterns} panels have a pattern, more than {MOST_PATTERNS}"
            raise Refused(message, "Use metrics instead, or a second dashboard.", field="panels")
        ids = Counter(panel.id for panel in self.panels)
        id, count = ids.most_common(1)[0] if ids else ("", 1)
        if count > 1:
            raise Refused(
                f"{count} panels have the id {id!r}", "Use different ids.", field="panels"
            )
        return self

    def to_document(self) -> dict[str, Any]:
        """JSON data with the version, without other values that are defaults."""
        panels = [panel.to_document() for panel in self.panels]
        runs = {} if self.runs is None else {"runs": self.runs.model_dump(exclude_defaults=True)}
        return {"version": self.version, "panels": panels, **runs}

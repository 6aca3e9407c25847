"""One chart of a run page: its series, unit and scales.

Titles and labels are marked where panels are defined and translated by `Panel.to_dict`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from django.utils.translation import gettext
from django.utils.translation import gettext_noop as _


@dataclass(frozen=True, slots=True)
class Line:
    """One series of a chart; `hue` names a color of tokens.css, `dash` is Plotly's."""

    name: str
    label: str
    hue: str
    dash: str = ""


@dataclass(frozen=True, slots=True)
class Level:
    """A predicted value: a dashed line across the chart."""

    label: str
    hue: str
    value: float


@dataclass(frozen=True, slots=True)
class Panel:
    """A chart: `kind` is lines or stack; `zero`: y includes 0; `log`: starts logarithmic.

    `empty` is the text shown without data.
    """

    id: str
    title: str
    unit: str
    series: tuple[Line, ...]
    kind: str = "lines"
    zero: bool = False
    log: bool = False
    wide: bool = False
    rank: int | None = None
    empty: str = _("No data yet: points appear here when the run logs them.")
    levels: tuple[Level, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the chart as the page's script reads it, translated."""
        panel = replace(
            self,
            title=gettext(self.title),
            empty=gettext(self.empty),
            series=tuple(replace(line, label=gettext(line.label)) for line in self.series),
        )
        return asdict(panel)


def single(
    id: str,
    title: str,
    unit: str,
    name: str,
    label: str,
    hue: str,
    *,
    zero: bool = True,
    log: bool = False,
) -> Panel:
    """Return a chart of one metric; most start at zero."""
    return Panel(id, title, unit, (Line(name, label, hue),), zero=zero, log=log)

"""Normal form of HTML for assertions that do not depend on the templates' line breaks."""

from __future__ import annotations

import re


def compact(page: str) -> str:
    """Collapses whitespace and removes it next to tags."""
    return re.sub(r"\s*(<|>)\s*", r"\1", re.sub(r"\s+", " ", page))

"""From rows to curves, lines and newest values, as `selectors` hands them out."""

"""Setup of an attempt: spec, start, initial weights, the composition root."""

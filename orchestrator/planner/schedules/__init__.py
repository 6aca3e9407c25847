"""Pipeline schedules: what each device runs, how long a step lasts, how much is in flight.

`orders` what runs in which order · `program` and `simulate` when, by events · `steady` long steps
from short ones ·
`closed` the same as formulas · `columns` for many plans at once · `inflight` activations held ·
`timeline` for drawing.
"""

"""Pipeline schedules: operations of each device, step time, micro-batches in flight.

`orders` lists operations, `program` and `simulate` run them as events, `steady` extrapolates long
steps, `closed` has formulas, `columns` evaluates many plans, `inflight` counts saved activations,
`timeline` prepares drawings.
"""

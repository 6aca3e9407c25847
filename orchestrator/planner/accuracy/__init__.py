"""How far predictions lie from measured runs: splits, measures and the rows of
docs/planner-accuracy.md.

Reads measurement files by path and keeps none of them. Predicts and fits nothing itself.
"""

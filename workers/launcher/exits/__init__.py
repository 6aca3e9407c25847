"""Exits of attempts that the supervisor decides; `exit_classification` judges those of ranks."""

"""Precision, loss scaling, checks of numbers and CPU matrix products."""

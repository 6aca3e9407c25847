"""Trains by the product's own formulas on two problems whose exact answers are known."""

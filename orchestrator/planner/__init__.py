"""Predicts memory, time and cost of parallel plans, and ranks them."""

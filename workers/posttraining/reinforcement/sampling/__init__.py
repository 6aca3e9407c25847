"""Prompts, and groups of answers to them sampled by the inference engine."""

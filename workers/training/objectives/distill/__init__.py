"""Distillation: divergences from a teacher, its files of top tokens, answers of the student."""

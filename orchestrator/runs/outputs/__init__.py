"""Reads what runs produce: endpoints, answers, results, samples, benchmark tables."""

"""The performance model: terms for memory, compute, communication and step time."""

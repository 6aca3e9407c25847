"""Context parallelism: positions of a sequence over ranks, ring attention."""

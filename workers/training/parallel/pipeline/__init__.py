"""Pipeline parallelism: stages, schedules, tied embeddings, PipeDream, evaluation."""

"""Terms of the step: pipeline, step time, its intervals and cost."""

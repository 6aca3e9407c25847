"""Options of fine-tuning: objectives and adapters of a training body."""

"""Pipeline parallelism: parts of the model, torch's schedules over them, tied ends, evaluation."""

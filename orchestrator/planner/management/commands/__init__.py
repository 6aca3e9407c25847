"""`manage.py plan`, `calibrate` and `planner_accuracy`."""

"""The planner pages: form, queries, results and their charts."""

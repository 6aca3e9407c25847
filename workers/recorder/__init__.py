"""The recorder for programs that Orrery did not start, and adapters for other frameworks.

Depends only on the REST interface of runs.
"""

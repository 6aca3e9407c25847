"""The recorder for programs that Orrery did not start, and doors from other frameworks into it.

Knows the REST interface of runs; imports nothing else of Orrery.
"""

"""Replaces torch in fault-injection tests, so supervisors start fake ranks in milliseconds."""

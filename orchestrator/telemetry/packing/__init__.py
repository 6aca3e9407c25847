"""Points as arrays and bytes: chunks, summaries, reduction, number ranges.

Pure: does not depend on a database or Django.
"""

"""Points as arrays and bytes: chunks, summaries, reduction, number ranges.

Pure; no database, no Django.
"""

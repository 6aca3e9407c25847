"""The decoder family shared by training and inference.

Does not depend on runs, plans or data.
"""

"""Several tokens a step: a draft proposes them, the model checks them in one pass, and its
distribution stays.
"""

"""Lines of fine-tuning data as examples: one form for every format, with errors that name a hint.

Does not read files and does not depend on tokenizers or templates.
"""

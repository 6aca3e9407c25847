"""From files to samples: reading, tokenising, mapping, mixing.

Which rank gets which sample is `batches`' business.
"""

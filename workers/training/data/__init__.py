"""Files to samples: reading, tokenizing, mapping and mixing.

Does not depend on ranks: `batch_sharding` decides which rank gets which sample.
"""

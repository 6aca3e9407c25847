"""Lines of fine-tuning data as rows: reading, templates, packing and statistics.

Does not depend on ranks or devices, and loads no torch.
"""

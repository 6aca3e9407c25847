"""Hugging Face folders: their configurations, tensor names and safetensors files.

Does not depend on runs or training.
"""

"""Hugging Face folders: their configurations, tensor names and safetensors files.

Knows nothing of runs or training.
"""

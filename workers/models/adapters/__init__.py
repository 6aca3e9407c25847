"""Adapters: parameter-efficient fine-tuning of a decoder, their files, and merging them."""

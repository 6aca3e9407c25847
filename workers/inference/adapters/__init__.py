"""Serves many adapters over one base model: their files, their slots, and their updates."""

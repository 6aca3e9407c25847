"""Many adapters over one base model."""

"""Columns of terms that are derived from one object: of the model, of pipeline stages."""

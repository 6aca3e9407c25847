"""Runs of kind produce: data from a served model, filtered, with provenance."""

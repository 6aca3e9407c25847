"""Registered data sets: named, versioned files with fingerprint, copy in the store and lineage."""

"""Constrained decoding: token masks for a JSON schema, a regular expression or a grammar."""

"""Charts as pure functions: data in, layout out."""

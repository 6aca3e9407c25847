"""Programs of script runs as data: their files and where they came from."""

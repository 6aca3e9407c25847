"""Post-training parts that use both training and inference."""

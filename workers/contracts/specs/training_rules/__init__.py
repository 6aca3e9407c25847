"""What the training engine combines: transforms in order, techniques, refused combinations."""

"""Messages that could not be processed, for an operator to retry or drop."""

"""Text of pages: headlines, events, numbers, logs, Markdown."""

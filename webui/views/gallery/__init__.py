"""The gallery of charts and components, and its sample data."""

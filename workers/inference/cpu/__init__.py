"""Speed on CPUs: prepacked matrix products and threads."""

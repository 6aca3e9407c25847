"""Settings from environment variables: `variables` lists them, `read` reads them."""

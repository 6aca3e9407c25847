"""Forms: run spec, its check and forecast, list filters."""

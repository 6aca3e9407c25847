"""Panels: what one chart, picture, text or table of a dashboard or report shows, and its data."""

"""Pages of reports and dashboards."""

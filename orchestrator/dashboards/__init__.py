"""Dashboards: panels that users arrange for a run, an experiment, a team or themselves."""

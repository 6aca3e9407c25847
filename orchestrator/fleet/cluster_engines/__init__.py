"""Clusters with a scheduler of their own: settings, pools, identities of their supervisors."""

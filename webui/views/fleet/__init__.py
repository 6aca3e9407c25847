"""Pages of the fleet and its nodes, and of cluster engines."""

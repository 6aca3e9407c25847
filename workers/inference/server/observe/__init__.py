"""What a server reports: engine state, snapshots, finished requests, metrics."""

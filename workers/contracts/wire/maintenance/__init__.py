"""Messages about the upkeep of nodes: probes before attempts, deletion of what runs left."""

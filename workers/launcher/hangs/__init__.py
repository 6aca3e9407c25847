"""Detection of hangs and stragglers by the beacons of ranks."""

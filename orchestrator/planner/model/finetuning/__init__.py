"""What a run trains: columns and sums of trained, frozen and added weights, and second modules."""

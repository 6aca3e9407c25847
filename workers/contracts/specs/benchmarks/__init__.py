"""What a benchmark run trains and the variants that it compares."""

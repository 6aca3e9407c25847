"""What programs record next to metrics: configuration, summary, origin, images and other media."""

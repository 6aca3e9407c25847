"""Short measurements of devices and of the network between them."""

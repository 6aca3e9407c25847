"""From what came in to rows and live frames, inside the transaction of `services`."""

"""Messages, points, events and reports, and the names of their keys and queues."""

"""One call, both ends: its context, its streams, sending it and running it."""

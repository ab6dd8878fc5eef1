"""Messages that wait for their time."""

"""Messages that are stored: where they lie, how they are read, and how they become segments."""

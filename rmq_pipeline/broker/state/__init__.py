"""State of the broker in memory: columns and indexes, changed by events only."""

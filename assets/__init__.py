"""Assets of the application: the broker's own background work."""

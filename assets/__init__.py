"""Assets of the application: the broker's background work."""

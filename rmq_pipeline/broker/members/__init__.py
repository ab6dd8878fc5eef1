"""Members of consumer groups: their heartbeats, queue locks and filters."""

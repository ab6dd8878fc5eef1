"""What lies on disk: the commit log, and what is derived from it."""

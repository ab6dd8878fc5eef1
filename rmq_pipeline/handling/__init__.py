"""What every consumer run by windows has: its handler, the walk over a batch, the settle."""

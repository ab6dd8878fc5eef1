"""Resources of the application, for each place it runs in."""

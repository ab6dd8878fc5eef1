"""Resources of the application, per deployment."""

"""Backups of homes, restoring them, and copies of a home as it was at a moment."""

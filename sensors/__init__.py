"""Sensors of the application."""

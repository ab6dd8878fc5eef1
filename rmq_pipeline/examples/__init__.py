"""Runnable examples; each is also a test."""

"""Failures: tried again, held, given up, buried, and opened again."""

"""Transactions: half messages, their checks, and their ends."""

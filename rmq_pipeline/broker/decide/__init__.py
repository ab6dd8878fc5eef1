"""Requests and their decisions: pure functions of the state and the time."""

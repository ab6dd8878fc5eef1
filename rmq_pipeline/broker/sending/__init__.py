"""Sending: which queue, which offset, visible when, and whether it is a repetition."""

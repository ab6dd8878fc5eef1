"""Receiving: which messages a consumer group is given, in which order, and at what rate."""

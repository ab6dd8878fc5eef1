"""Receiving: the messages a consumer group gets, their order, and their rate."""

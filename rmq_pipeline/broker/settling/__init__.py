"""Settling: what became of deliveries, all of it in one step."""

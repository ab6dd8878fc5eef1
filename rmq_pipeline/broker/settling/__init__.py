"""Settling: the outcomes of deliveries, stored in one step."""

"""Stored messages: places, reading, sealing, compaction and expiry."""

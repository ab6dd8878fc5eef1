"""Sinks as tables: manifest of the current files, readers, compaction, rows of a message."""

"""Sinks as tables: which files count, how they are read, compacted, and traced to messages."""

"""Replay: hours of a topic are handled again, while the progress of the group is unchanged."""

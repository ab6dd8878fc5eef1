"""The table door: Arrow Flight, one exchange a call."""

"""The Flight endpoint: Arrow Flight, with one exchange or one action per call."""

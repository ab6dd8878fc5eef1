"""Verbs of an open broker, in groups by their users; ``Broker`` combines the groups."""

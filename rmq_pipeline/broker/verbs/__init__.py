"""The verbs of an open broker, by who uses them; ``Broker`` is all of them."""

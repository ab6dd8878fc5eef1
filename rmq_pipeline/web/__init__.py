"""The web page: the broker's state now and as of any moment, and an operator's actions.

It is served beside the broker, in the process of ``rmq up`` or ``rmq ui``, and calls the Flight
endpoint as a client. So a page has the rights of the user who opens it, and no page costs the
broker's process more than the calls it makes (docs/decisions/0105).
"""

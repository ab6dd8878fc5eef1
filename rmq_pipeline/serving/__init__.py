"""Broker process: serves the endpoints of one home until it receives a stop signal."""

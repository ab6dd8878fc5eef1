"""Metrics of a broker: their declarations, the Prometheus text, its HTTP listener, OTLP."""

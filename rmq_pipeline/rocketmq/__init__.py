"""The gRPC endpoint for RocketMQ 5 clients: decode a call, call the broker, encode the reply."""

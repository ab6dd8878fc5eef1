"""The door for RocketMQ 5 clients: gRPC, message by message; thin (decode, broker, encode)."""

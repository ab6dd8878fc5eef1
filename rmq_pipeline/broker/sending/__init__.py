"""Sending: choosing queues, offsets and delivery times, and suppressing repetitions."""

"""Stores that can carry the commit log: PostgreSQL, a bucket, and a stream of NATS."""

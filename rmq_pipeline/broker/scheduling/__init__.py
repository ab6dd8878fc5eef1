"""Scheduled messages: waiting, delivery at their time, and recall."""

"""The members of consumer groups: who is there, and which queues each has locked."""

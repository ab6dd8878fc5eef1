"""Outcomes of failed deliveries: retry, park, dead-letter, and redrive."""

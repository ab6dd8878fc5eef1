"""Hours of a topic again, through a consumer's handler; the group's own progress stays."""

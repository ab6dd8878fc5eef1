"""Users' SQL over delivery state: what is allowed, what is copied, and where it is run."""

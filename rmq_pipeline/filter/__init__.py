"""Which messages a reader wants: tag expressions and SQL92, run on whole tables (semantics §10)."""

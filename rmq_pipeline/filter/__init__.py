"""Filter expressions: tags and SQL92, evaluated on whole tables of messages (semantics §10)."""

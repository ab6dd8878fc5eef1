"""Half messages: begun, checked, and ended."""

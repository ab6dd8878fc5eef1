"""Work outside the decisions: the writer, reading, waiting, files, upkeep."""

"""The parts that all window consumers share: handler, walk over a batch, settle."""

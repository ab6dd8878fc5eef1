"""The store: the commit log, and the tables and files derived from it."""

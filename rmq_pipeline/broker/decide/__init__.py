"""Requests and their decisions: functions of the state and the time, without I/O.

They read the state, and leave changes to the events that they return. Exceptions: a receive adds
the group's empty consumption of a queue, and requests that fill or trim the read-ahead change that
cache.
"""

"""Requests and their decisions: functions of the state and the time, without I/O.

They read the state, and leave all changes to the writer: events, messages, and changes of memory
that the log does not hold (``Decision.unlogged``). A look-up may keep a result for the next one: a
bound on times, a sorted run, the age of a page. No answer depends on those
(tests/broker/decide/test_purity.py names them).
"""

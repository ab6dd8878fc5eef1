"""The broker's process: both doors of an open home, until it is told to stop."""

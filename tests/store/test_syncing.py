"""How far the log is on disk never goes back."""

import pytest

from tests.store.log_batches import OpenLog, messages, write


def test_a_sync_that_takes_long_takes_nothing_back(
    open_log: OpenLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log(flush="sync")
    write(log, messages(b"a"))
    log.synced = 0  # as a thread may find it while another one commits
    file = log._files[-1]
    sync = file.sync

    def slow() -> None:
        sync()
        write(log, messages(b"b"))

    monkeypatch.setattr(file, "sync", slow)
    log.sync()

    assert log.synced == log.end

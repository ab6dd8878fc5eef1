"""Local roots: errors are told as what they are."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from rmq_pipeline.storage.local import LocalRoot
from rmq_pipeline.storage.root import StorageRootError


def refused(*_: Any) -> None:
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))


def test_a_file_system_without_links_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", refused)

    with pytest.raises(StorageRootError, match="has no hard links"):
        LocalRoot(tmp_path).put_if_absent("x", b"1")
    assert not list(tmp_path.iterdir())


def test_a_refused_write_says_nothing_about_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "write_bytes", refused)

    with pytest.raises(PermissionError):
        LocalRoot(tmp_path).put_if_absent("x", b"1")


def test_a_folder_that_is_gone_is_not_synced(tmp_path: Path) -> None:
    root = LocalRoot(tmp_path)

    root.sync_folders(["hour=1"], missing_ok=True)

    with pytest.raises(FileNotFoundError):
        root.sync_folders(["hour=1"])

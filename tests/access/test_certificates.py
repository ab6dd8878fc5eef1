"""Certificates: the broker's own, and those that are given."""

import datetime as dt
import shutil
import socket
import stat
from pathlib import Path

import pytest
from cryptography import x509

from rmq_pipeline.access.certificates import Certificate
from rmq_pipeline.errors import RequestError


def test_the_homes_own_is_for_this_machine_and_is_kept(tmp_path: Path) -> None:
    made = Certificate.self_made(tmp_path)

    leaf = x509.load_pem_x509_certificate(made.chain)
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    hosts = names.get_values_for_type(x509.DNSName)
    assert {"localhost", socket.gethostname()} <= set(hosts)
    assert "127.0.0.1" in map(str, names.get_values_for_type(x509.IPAddress))
    assert leaf.not_valid_after_utc - dt.datetime.now(dt.UTC) > dt.timedelta(days=3000)
    assert made.name == "localhost"
    assert Certificate.self_made(tmp_path) == made


def test_only_the_owner_may_read_its_key(tmp_path: Path) -> None:
    made = Certificate.self_made(tmp_path)

    key = tmp_path / "tls" / "key.pem"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert stat.S_IMODE(key.parent.stat().st_mode) == 0o700
    assert made.key.decode() not in repr(made)


def test_one_that_was_left_half_made_is_made_again(tmp_path: Path) -> None:
    first = Certificate.self_made(tmp_path)
    (tmp_path / "tls" / "certificate.pem").unlink()

    again = Certificate.self_made(tmp_path)

    assert again.chain != first.chain
    assert Certificate.self_made(tmp_path) == again


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        Certificate.self_made(tmp_path / name)
    a, b = tmp_path / "a" / "tls", tmp_path / "b" / "tls"
    shutil.copy(a / "certificate.pem", a / "garbage.pem")
    (a / "garbage.pem").write_text("garbage")

    assert Certificate.read(a / "certificate.pem", a / "key.pem").name == "localhost"
    for chain, key, why in (
        (a / "certificate.pem", b / "key.pem", "not the key"),
        (a / "garbage.pem", a / "key.pem", "in PEM"),
        (a / "certificate.pem", a / "garbage.pem", "in PEM"),
        (a / "nothing.pem", a / "key.pem", "cannot be read"),
    ):
        with pytest.raises(RequestError, match=why):
            Certificate.read(chain, key)

"""Certificates: the broker's own, and those that are given."""

import datetime as dt
import os
import shutil
import socket
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

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


def test_who_has_the_brokers_key_cannot_sign_for_others(tmp_path: Path) -> None:
    made = Certificate.self_made(tmp_path)

    leaf, root = x509.load_pem_x509_certificates(made.chain)
    leaf.verify_directly_issued_by(root)
    for each, signs in ((leaf, False), (root, True)):
        assert each.extensions.get_extension_for_class(x509.BasicConstraints).value.ca is signs
        assert each.extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign is signs
    key = load_pem_private_key(made.key, None)
    assert key.public_key() == leaf.public_key()
    assert key.public_key() != root.public_key()
    assert {path.name for path in (tmp_path / "tls").iterdir()} == {"certificate.pem", "key.pem"}


def test_clients_trust_it_by_their_environment(tmp_path: Path) -> None:
    made = Certificate.self_made(tmp_path)
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_secure_port(
        "127.0.0.1:0", grpc.ssl_server_credentials([(made.key, made.chain)])
    )
    server.start()
    ask = (
        "import grpc, sys\n"
        "channel = grpc.secure_channel(sys.argv[1], grpc.ssl_channel_credentials())\n"
        "grpc.channel_ready_future(channel).result(20)\n"
    )

    # As the official Python client does, which cannot be told of a certificate otherwise.
    done = subprocess.run(
        [sys.executable, "-c", ask, f"localhost:{port}"],
        check=False,
        capture_output=True,
        env={**os.environ, "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": str(made.path)},
    )

    server.stop(None)
    assert done.returncode == 0, done.stderr


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


@pytest.mark.parametrize("left", ["another's", "garbage", "locked", "empty"])
def test_the_homes_own_is_made_again_where_key_and_certificate_are_no_pair(
    left: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = Certificate.self_made(tmp_path)
    other = Certificate.self_made(make_folder(tmp_path / "other"))
    locked = load_pem_private_key(other.key, None).private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")
    )
    keys = {"another's": other.key, "garbage": b"garbage", "locked": locked, "empty": b""}
    (tmp_path / "tls" / "key.pem").write_bytes(keys[left])

    made = Certificate.self_made(tmp_path)

    leaf = x509.load_pem_x509_certificate(made.chain)
    assert load_pem_private_key(made.key, None).public_key() == leaf.public_key()
    assert made.chain != first.chain
    assert Certificate.self_made(tmp_path) == made
    assert stat.S_IMODE((tmp_path / "tls" / "key.pem").stat().st_mode) == 0o600
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "Making both again" in caplog.text


def test_the_homes_own_is_not_made_again_because_it_may_not_be_read(tmp_path: Path) -> None:
    made = Certificate.self_made(tmp_path)
    key = tmp_path / "tls" / "key.pem"
    key.unlink()
    # No user, not even root, can read a folder as a file.
    key.mkdir()

    with pytest.raises(RequestError, match="cannot be read"):
        Certificate.self_made(tmp_path)

    assert made.path.read_bytes() == made.chain


def test_a_renewal_without_room_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Certificate.self_made(tmp_path)
    monkeypatch.setattr(socket, "gethostname", lambda: "another-host")
    # Where the new certificate is to go there is no place for a file.
    (tmp_path / "tls" / "certificate.part").mkdir()

    with pytest.raises(OSError, match=r"certificate\.part"):
        Certificate.self_made(tmp_path)

    assert Certificate.read(made.path, tmp_path / "tls" / "key.pem") == made


def make_folder(path: Path) -> Path:
    path.mkdir()
    return path

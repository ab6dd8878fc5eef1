"""Certificates of the endpoints: read from given files, or self-made by the broker."""

import datetime as dt
import ipaddress
import logging
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from rmq_pipeline import durable_files
from rmq_pipeline.errors import RequestError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

log = logging.getLogger(__name__)

#: Folder of the self-made certificate in the home.
FOLDER: Final = "tls"
CERTIFICATE: Final = "certificate.pem"
KEY: Final = "key.pem"
#: Long, because clients hold copies and each replacement has to reach them.
_VALID_FOR: Final = dt.timedelta(days=3650)
#: A certificate with less time left than this is replaced at the start of the broker.
_RENEWED_BEFORE: Final = dt.timedelta(days=30)
_BACKDATED: Final = dt.timedelta(hours=1)


@dataclass(frozen=True)
class Certificate:
    """Certificate chain of an endpoint, and its private key."""

    #: In PEM: the certificate, followed by its issuers.
    chain: bytes
    #: Private key in PEM, without a passphrase.
    key: bytes = field(repr=False)
    #: File of the chain.
    path: Path
    #: Host name or address that the certificate is valid for.
    name: str
    #: File of the private key.
    key_path: Path

    @classmethod
    def read(cls, path: Path, key: Path) -> Self:
        """Read a certificate and its key from two PEM files.

        Raises:
            RequestError: a file cannot be read or parsed, or the key does not match.
        """
        return cls._paired(_contents(path, key), path=path, key=key)

    @classmethod
    def self_made(cls, home: Path) -> Self:
        """Return the home's self-made certificate; make it if necessary.

        A new one replaces a missing certificate, one that expires within 30 days, and one for
        another host. It also replaces a certificate and key that do not match: a crash between
        the replacements of the two files leaves such a pair.

        Raises:
            RequestError: the files exist but cannot be read.
            OSError: the files cannot be written.
        """
        folder = home / FOLDER
        path, key = folder / CERTIFICATE, folder / KEY
        if path.exists() and key.exists():
            contents = _contents(path, key)
            try:
                found = cls._paired(contents, path=path, key=key)
            except RequestError as error:
                log.warning(
                    "%s Making both again; clients need the new certificate.", error.message
                )
            else:
                if _lasts(found):
                    return found
        folder.mkdir(mode=0o700, exist_ok=True)
        durable_files.sync(home)
        chain, secret = _make()
        # Both new files are synced before the first replacement: a full disk changes nothing.
        parts = [_write_part(key, secret, mode=0o600), _write_part(path, chain, mode=0o644)]
        for part, whole in zip(parts, (key, path), strict=True):
            part.replace(whole)
        durable_files.sync(folder)
        return cls.read(path, key)

    @classmethod
    def _paired(cls, contents: tuple[bytes, bytes], *, path: Path, key: Path) -> Self:
        from cryptography import x509
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        chain, secret = contents
        try:
            leaf = x509.load_pem_x509_certificates(chain)[0]
            private = load_pem_private_key(secret, None)
        except (ValueError, TypeError, IndexError) as error:
            raise RequestError(
                f"{path} and {key} are not a certificate and a key without passphrase in PEM.",
                remedy="Convert both files to PEM and remove the passphrase.",
            ) from error
        if private.public_key() != leaf.public_key():
            raise RequestError(
                f"{key} is not the key of {path}.", remedy="Give the key of this certificate."
            )
        return cls(chain, secret, path.absolute(), _name_in(leaf), key.absolute())


def _lasts(found: Certificate) -> bool:
    """Return True if the certificate names this host and is valid for 30 more days."""
    from cryptography import x509

    leaf = x509.load_pem_x509_certificate(found.chain)
    left = leaf.not_valid_after_utc - dt.datetime.now(dt.UTC)
    return left > _RENEWED_BEFORE and socket.gethostname() in _names_in(leaf)


def _contents(path: Path, key: Path) -> tuple[bytes, bytes]:
    try:
        return path.read_bytes(), key.read_bytes()
    except OSError as error:
        raise RequestError(
            f"{error.filename} cannot be read: {error.strerror}.",
            remedy="Check the path and its permissions.",
        ) from error


def _make() -> tuple[bytes, bytes]:
    """Make a certificate for this host; return the chain with its signer, and the key.

    Clients trust the signer's certificate, because gRPC trusts only certificates that may sign.
    The signer's key is not stored, so it can never sign another certificate.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    host, pem = socket.gethostname(), serialization.Encoding.PEM
    key, signer = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    issuer = _name(f"signer of the rmq broker on {host}")
    root = (
        _unsigned(issuer, signer.public_key(), issuer=issuer, signer=signer.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .sign(signer, hashes.SHA256())
    )
    name = _name(f"rmq broker on {host}")
    leaf = (
        _unsigned(name, key.public_key(), issuer=issuer, signer=signer.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(_hosts(host), critical=False)
        .add_extension(
            x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False
        )
        .sign(signer, hashes.SHA256())
    )
    unlocked = serialization.NoEncryption()
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, unlocked)
    return leaf.public_bytes(pem) + root.public_bytes(pem), secret


def _unsigned(
    subject: "x509.Name",
    public: "ec.EllipticCurvePublicKey",
    *,
    issuer: "x509.Name",
    signer: "ec.EllipticCurvePublicKey",
) -> "x509.CertificateBuilder":
    from cryptography import x509

    now = dt.datetime.now(dt.UTC)
    by = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + _VALID_FOR)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(by, critical=False)
    )


def _name(text: str) -> "x509.Name":
    from cryptography import x509

    # X.509 allows 64 characters here; clients check the alternative names instead.
    return x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, text[:64])])


def _hosts(host: str) -> "x509.SubjectAlternativeName":
    from cryptography import x509

    names = dict.fromkeys(("localhost", host, socket.getfqdn()))
    addresses = (ipaddress.ip_address(each) for each in ("127.0.0.1", "::1"))
    return x509.SubjectAlternativeName(
        [*(x509.DNSName(each) for each in names), *(x509.IPAddress(each) for each in addresses)]
    )


def _usage(*, signs: bool) -> "x509.KeyUsage":
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )


def _names_in(leaf: "x509.Certificate") -> list[str]:
    from cryptography import x509

    try:
        found = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    addresses = [str(each) for each in found.get_values_for_type(x509.IPAddress)]
    return [*found.get_values_for_type(x509.DNSName), *addresses]


def _name_in(leaf: "x509.Certificate") -> str:
    """Return a name that the certificate is valid for; ``broker`` replaces a wildcard."""
    names = _names_in(leaf)
    return names[0].replace("*", "broker", 1) if names else "localhost"


def _write_part(path: Path, data: bytes, *, mode: int) -> Path:
    """Write and sync the file that will replace ``path``, and return its path.

    The file has its final mode from the start, so that no other user can read a key.
    """
    part = path.with_suffix(".part")
    part.unlink(missing_ok=True)
    handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return part

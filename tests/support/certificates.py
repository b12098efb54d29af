"""Certificates for tests, made by the openssl command."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.support.run.required_tools import require

if TYPE_CHECKING:
    from pathlib import Path

NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
NAMES = "subjectAltName=DNS:localhost,IP:127.0.0.1"


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, as files."""

    certificate: Path
    key: Path

    def replace(self, other: Pair) -> None:
        """Replace the files by those of ``other``, each as a whole."""
        for new, old in ((other.certificate, self.certificate), (other.key, self.key)):
            beside = old.with_suffix(".new")
            beside.write_bytes(new.read_bytes())
            beside.replace(old)


def certificate(folder: Path, name: str, issuer: Pair | None = None, days: int = 30) -> Pair:
    """A certificate for localhost with ``name`` as subject: its own authority, or issued by ``issuer``.

    days: how long it lasts; -1: it has ended.
    """
    pair = Pair(folder / f"{name}.pem", folder / f"{name}.key")
    request = folder / f"{name}.csr"
    _openssl("req", "-new", *NEW_KEY, "-keyout", pair.key, "-out", request, "-subj", f"/CN={name}")
    extensions = folder / f"{name}.ext"
    extensions.write_text(f"{NAMES}\nbasicConstraints=critical,CA:{str(issuer is None).upper()}\n")
    signer = ("-CA", issuer.certificate, "-CAkey", issuer.key, "-CAcreateserial") if issuer else ("-signkey", pair.key)
    _openssl("x509", "-req", "-in", request, *signer, "-days", days, "-extfile", extensions, "-out", pair.certificate)
    return pair


def encrypted(pair: Pair) -> Pair:
    """The same certificate with its key under a password."""
    key = pair.key.with_suffix(".locked")
    _openssl("ec", "-in", pair.key, "-aes256", "-passout", "pass:word", "-out", key)
    return Pair(pair.certificate, key)


def _openssl(*words: object) -> None:
    subprocess.run([require("openssl"), *map(str, words)], check=True, capture_output=True)

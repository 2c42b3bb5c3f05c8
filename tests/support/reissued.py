# SPDX-License-Identifier: Apache-2.0
"""A kit's certificate of other days."""

import datetime
import json
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

from medpfl.flare.provision import Provisioned


def reissue(kit: Path, made: Provisioned, begins: int, ends: int, name: str = "client.crt") -> None:
    """The kit's certificate again, from the same root, valid for other days (counted from now)."""
    state = json.loads((made.state / "cert.json").read_text())
    root_key = load_pem_private_key(state["root_pri_key"].encode(), password=None)
    old = x509.load_pem_x509_certificate((kit / "startup" / name).read_bytes())
    now = datetime.datetime.now(datetime.UTC)
    new = (
        x509.CertificateBuilder()
        .subject_name(old.subject)
        .issuer_name(old.issuer)
        .public_key(old.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + datetime.timedelta(days=begins))
        .not_valid_after(now + datetime.timedelta(days=ends))
        .sign(root_key, hashes.SHA256())  # type: ignore[arg-type]
    )
    (kit / "startup" / name).write_bytes(new.public_bytes(Encoding.PEM))

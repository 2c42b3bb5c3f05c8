# SPDX-License-Identifier: Apache-2.0
"""A kit's certificates, and whether its server accepts them: mutual TLS, tried as FLARE uses it."""

import datetime
import socket
import ssl
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key
from cryptography.x509.oid import NameOID
from nvflare.lighter.constants import ProvFileName
from nvflare.lighter.utils import verify_folder_signature

from medpfl.flare.finding import Finding, note, ok, problem
from medpfl.flare.kits import Kit
from medpfl.flare.provision import MUTUAL_TLS, fingerprint

SOON = 30  # days before its end in which a certificate is pointed out
CONNECT_TIMEOUT = 5.0  # seconds
VERDICT_TIMEOUT = 1.0  # seconds; in TLS 1.3 a refused client learns it only after its own handshake is done
_AGAIN = "ask the coordinating centre for a new kit"
_CLOCK = (
    "compare this machine's clock with the server's and set the wrong one (NTP); if both are right, ask for new kits"
)
_OWN_CLOCK = "set this machine's clock if it is wrong (NTP); else make a new kit of it at the coordinating centre"
# OpenSSL's codes: X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED.
_OF_TIME = {9: "is not valid yet", 10: "has expired"}


def check_identity(kit: Kit) -> Iterator[Finding]:
    """Certificates: there, whole, of this root and this participant, valid now."""
    check = "certificates"
    if kit.security != MUTUAL_TLS:
        yield problem(check, f"connection_security is '{kit.security}', expected '{MUTUAL_TLS}'", _AGAIN)
    try:
        certificate, root = _load(kit.certificate), _load(kit.root)
        key = load_pem_private_key(kit.key.read_bytes(), password=None)
    except OSError as error:
        yield problem(check, f"cannot read {error.filename}: {error.strerror}", _AGAIN)
        return
    except (ValueError, TypeError) as error:
        yield problem(check, f"a certificate or key in {kit.certificate.parent} is damaged ({error})", _AGAIN)
        return
    wrong, early = list(_disagreements(kit, certificate, root)), False
    formats = Encoding.DER, PublicFormat.SubjectPublicKeyInfo
    if key.public_key().public_bytes(*formats) != certificate.public_key().public_bytes(*formats):
        wrong.append(f"{kit.key.name} is not the key of {kit.certificate.name}")
    now = datetime.datetime.now(datetime.UTC)
    days = {}
    for path, found in ((kit.certificate, certificate), (kit.root, root)):
        days[path] = (found.not_valid_after_utc - now).days
        if found.not_valid_after_utc < now:
            wrong.append(f"{path.name} expired on {found.not_valid_after_utc:%Y-%m-%d}")
        if found.not_valid_before_utc > now:
            early = True
            begin = f"{found.not_valid_before_utc:%Y-%m-%d %H:%M} UTC"
            wrong.append(f"{path.name} is valid only from {begin}, and by this machine's clock it is {_now()}")
    if wrong:
        yield problem(check, "; ".join(wrong), _CLOCK if early else f"{_AGAIN} (and check this machine's clock)")
    else:
        path, left = min(days.items(), key=lambda item: item[1])
        text = f"issued by this federation to '{kit.name}', valid for {left} more days"
        late = f"ask the coordinating centre for a new kit before {path.name} expires"
        yield ok(check, text) if left > SOON else note(check, text, late)
    yield ok("root", f"SHA-256 {fingerprint(root)}")
    yield from _signatures(kit)


def _now() -> str:
    return f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC"


def _load(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def soon_ended(kit: Kit) -> datetime.datetime | None:
    """The end of a new kit's certificate, where it has come or comes within ``SOON`` days."""
    end = _load(kit.certificate).not_valid_after_utc
    return end if (end - datetime.datetime.now(datetime.UTC)).days <= SOON else None


def _disagreements(kit: Kit, certificate: x509.Certificate, root: x509.Certificate) -> Iterator[str]:
    try:
        certificate.verify_directly_issued_by(root)
    except (ValueError, TypeError, InvalidSignature):
        yield f"{kit.certificate.name} was not issued by {kit.root.name}"
    names = [str(entry.value) for entry in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    if kit.name not in names:
        yield f"{kit.certificate.name} is issued to {', '.join(names)}, the kit is '{kit.name}'"


def _signatures(kit: Kit) -> Iterator[Finding]:
    """FLARE signs the files of special kits only (homomorphic encryption, confidential computing)."""
    for folder in (kit.folder / "startup", kit.local):
        if (folder / ProvFileName.SIGNATURE_JSON).is_file():
            signed = verify_folder_signature(
                str(folder), str(kit.root), single_signer=True, signature_file=ProvFileName.SIGNATURE_JSON
            )
            if signed:
                yield ok("signatures", f"the files in {folder} are as the coordinating centre signed them")
            else:
                yield problem("signatures", f"files in {folder} were changed after they were signed", _AGAIN)


def handshake(kit: Kit, host: str, certificate: bool = True) -> str:
    """Connect to the kit's port at ``host`` as FLARE does: TLS with the kit's own certificate, or without one.

    Returns:
        TLS version and the name the server's certificate is issued to.

    Raises:
        OSError: no connection (``ssl.SSLError`` is one): who refused whom is in its text.
    """
    context = _context(kit, certificate)
    with (
        socket.create_connection((host, kit.port), CONNECT_TIMEOUT) as plain,
        context.wrap_socket(plain, server_hostname=host) as secure,
    ):
        names: Any = (secure.getpeercert() or {}).get("subject", ())
        subject: dict[str, str] = dict(entry[0] for entry in names)
        secure.settimeout(VERDICT_TIMEOUT)
        try:
            if secure.recv(1) == b"":
                raise ConnectionResetError("the server closed the connection")
        except TimeoutError:
            pass  # accepted: the server waits for FLARE's first message
        return f"{secure.version()} with '{subject.get('commonName', '?')}'"


def _context(kit: Kit, certificate: bool = True) -> ssl.SSLContext:
    """TLS with the kit's own files. Raises OSError (``ssl.SSLError`` is one) where they cannot be used."""
    context = ssl.create_default_context(cafile=str(kit.root))
    context.check_hostname = False  # as FLARE: the root certificate belongs to this federation alone
    if certificate:
        context.load_cert_chain(str(kit.certificate), str(kit.key))
    return context


def check_server(kit: Kit) -> Iterator[Finding]:
    """Whether the server, or the relay before it, is reached and accepts this kit; of a server's or relay's own kit,
    whether it can listen."""
    check = "relay" if kit.relay else "server"
    address = f"{kit.host}:{kit.port}"
    if kit.listens is not None:
        yield _own_port(kit, kit.listens)
    if kit.role == "server":
        return
    try:
        _context(kit)
    except ssl.SSLError:  # it comes from these files: no server was asked
        yield note(check, "not tried: this kit's own certificates or key cannot be used (see 'certificates' above)")
        return
    except OSError:
        yield note(check, "not tried: a certificate or the key is missing or cannot be read")
        return
    try:
        yield ok(check, f"{address} is reached: {handshake(kit, kit.host)}, both sides' certificates accepted")
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in _OF_TIME:
            yield problem(
                check,
                f"by this machine's clock, {_now()}, {address}'s certificate {_OF_TIME[error.verify_code]}",
                _CLOCK,
            )
            return
        text = f"{address} has a certificate that is not of this federation ({error.verify_message})"
        yield problem(check, text, "ask your network people for a way to it that no proxy opens; else a new kit")
    except ssl.SSLError as error:
        if "CERTIFICATE_EXPIRED" in (error.reason or ""):
            yield problem(
                check, f"by the clock of {address} this kit's certificate expired; here it is {_now()}", _CLOCK
            )
            return
        if "BAD_CERTIFICATE" in (error.reason or ""):  # what OpenSSL answers before a certificate's first day
            text = f"{address} refuses this kit's certificate, as a server does by whose clock it is not valid yet"
            yield problem(check, f"{text}; here it is {_now()}", _CLOCK)
            return
        text = f"{address} refuses this kit's certificate ({(error.reason or str(error)).lower().replace('_', ' ')})"
        yield problem(check, text, "see 'certificates' above; else ask the coordinating centre for a new kit")
    except socket.gaierror as error:
        mend = f"ask your network people for a DNS entry, or add '{kit.host}' to /etc/hosts"
        yield problem(check, f"the name {kit.host} is not known here ({error.strerror})", mend)
    except TimeoutError:
        text = f"{address} does not answer within {CONNECT_TIMEOUT:g} seconds"
        yield problem(check, text, f"ask your network people to allow outgoing TCP to {address}")
    except ConnectionRefusedError:
        mend = f"ask the coordinating centre whether the {check} runs, and your network people about outgoing TCP"
        yield problem(check, f"nothing listens at {address}", mend)
    except OSError as error:
        mend = f"ask your network people to allow outgoing TCP to {address}, unchanged"
        yield problem(check, f"no connection to {address}: {error.strerror or error}", mend)


def _own_port(kit: Kit, port: int) -> Finding:
    where = f" as {kit.host}:{port}" if kit.role == "server" else ""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            return ok(kit.role, f"port {port} is free; hospitals must be able to reach it{where}")
        except OSError as error:
            reason = error.strerror
    try:
        return ok(kit.role, f"it runs: {handshake(replace(kit, port=port), 'localhost')} at port {port}")
    except OSError as error:
        if isinstance(error, ssl.SSLCertVerificationError) and error.verify_code in _OF_TIME:  # it is of this root
            text = f"it runs at port {port}, and every hospital refuses it: by this machine's clock, {_now()}, its "
            return problem(kit.role, f"{text}certificate {_OF_TIME[error.verify_code]}", _OWN_CLOCK)
        mend = "stop what uses the port, or choose another in project.yml and provision again"
        return problem(kit.role, f"port {port} cannot be used: {reason}, and not by this {kit.role}", mend)

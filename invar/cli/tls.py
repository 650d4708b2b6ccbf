"""TLS: the files it needs, looked at before anything is loaded."""

from __future__ import annotations

import argparse
import os
import ssl
from dataclasses import dataclass


@dataclass(frozen=True)
class Tls:
    """Files that have been looked at, and what clients must show."""

    certfile: str
    keyfile: str | None  # None: it stands in certfile
    ca_certs: str | None
    cert_reqs: int  # as in `ssl.VerifyMode`


def tls_options(args: argparse.Namespace) -> Tls | None:
    """None: plain HTTP. Raises ValueError for files that do not do."""
    cert, key, authorities = args.ssl_certfile, args.ssl_keyfile, args.ssl_ca_certs
    wanted = args.ssl_cert_reqs
    if cert is None:
        for flag, value in (("keyfile", key), ("ca-certs", authorities), ("cert-reqs", wanted)):
            if value:
                raise ValueError(f"--ssl-{flag} needs --ssl-certfile")
        return None
    if wanted is None:
        wanted = 0 if authorities is None else 2
    if wanted not in (0, 1, 2) or (wanted and authorities is None):
        raise ValueError("--ssl-cert-reqs: 0, 1 or 2, and above 0 with --ssl-ca-certs")

    def no_password() -> str:
        raise ValueError(f"--ssl-keyfile {key or cert}: it is encrypted; decrypt it first")

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    for path in filter(None, (cert, key, authorities)):
        if not os.path.isfile(path):
            raise ValueError(f"{path}: there is no such file")
    try:
        context.load_cert_chain(cert, key, no_password)
    except ssl.SSLError as error:
        shown = f"--ssl-certfile {cert}" + (f", --ssl-keyfile {key}" if key else "")
        raise ValueError(f"{shown}: no certificate with its key as PEM ({error.reason})") from None
    try:
        if authorities is not None:
            context.load_verify_locations(authorities)
    except ssl.SSLError:
        raise ValueError(f"--ssl-ca-certs {authorities}: no certificates as PEM") from None
    return Tls(cert, key, authorities, wanted)

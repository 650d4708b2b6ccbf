"""TLS: a certificate of our own, clients with and without one, files that do not do."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path

import httpx
import pytest

from invar.cli import serve
from invar.cli.rewrite import rewrite
from invar.cli.tls import Tls, tls_options

from .commands import serving

TINY = str(Path(__file__).parents[1] / "golden" / "llama_gqa.gguf")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """cert.pem and key.pem of 127.0.0.1, other.pem a key that is not its own."""
    folder = tmp_path_factory.mktemp("tls")
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    name = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    for cert, key in (("cert", "key"), ("cert2", "other")):
        out = ["-keyout", f"{folder}/{key}.pem", "-out", f"{folder}/{cert}.pem"]
        command = ["openssl", "req", "-x509", *curve, *name, *out]
        subprocess.run(command, check=True, capture_output=True)
    encrypt = ["openssl", "ec", "-aes128", "-passout", "pass:abcd"]
    paths = ["-in", f"{folder}/key.pem", "-out", f"{folder}/locked.pem"]
    subprocess.run([*encrypt, *paths], check=True, capture_output=True)
    return folder


def options(*words: str) -> Tls | None:
    parser = serve.parser()
    return tls_options(parser.parse_args(rewrite("serve", words, parser.own).argv))


def test_serves_those_who_show_a_certificate(files: Path) -> None:
    cert, key = str(files / "cert.pem"), str(files / "key.pem")
    words = ("--ssl-certfile", cert, "--ssl-keyfile", key, "--ssl-ca-certs", cert)
    with serving(TINY, *words) as server:
        assert server.url.startswith("https://")
        trusted = ssl.create_default_context(cafile=cert)
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{server.url}/health", verify=trusted)
        with pytest.raises(httpx.TransportError):
            httpx.get(server.url.replace("https", "http"))
        trusted.load_cert_chain(cert, key)
        with httpx.Client(base_url=server.url, verify=trusted, timeout=60) as http:
            body = {"prompt": [3, 4], "max_tokens": 40, "ignore_eos": True, "stream": True}
            assert http.post("/v1/completions", json=body).text.endswith("data: [DONE]\n\n")
        assert "--cacert" in server.printed()
        assert server.end() == 0
        assert "Traceback" not in server.printed()


def test_options_that_do(files: Path) -> None:
    cert, key = str(files / "cert.pem"), str(files / "key.pem")
    assert options() is None
    assert options("--ssl-cert-file", cert, "--ssl-key-file", key) == Tls(cert, key, None, 0)
    authorities = ("--ssl-certfile", cert, "--ssl_keyfile", key, "--ssl-ca-certs", cert)
    assert options(*authorities) == Tls(cert, key, cert, 2)
    assert options(*authorities, "--ssl-cert-reqs", "1") == Tls(cert, key, cert, 1)


@pytest.mark.parametrize(("words", "said"), [
    (["--ssl-keyfile", "key.pem"], "needs --ssl-certfile"),
    (["--ssl-ca-certs", "cert.pem"], "needs --ssl-certfile"),
    (["--ssl-certfile", "absent.pem"], "no such file"),
    (["--ssl-certfile", "cert.pem"], "no certificate with its key"),
    (["--ssl-certfile", "cert.pem", "--ssl-keyfile", "other.pem"], "no certificate with its key"),
    (["--ssl-certfile", "cert.pem", "--ssl-keyfile", "locked.pem"], "it is encrypted"),
    (["--ssl-certfile", "cert.pem", "--ssl-keyfile", "key.pem", "--ssl-cert-reqs", "2"], "0, 1 or"),
    (["--ssl-certfile", "cert.pem", "--ssl-keyfile", "key.pem", "--ssl-ca-certs", "key.pem"],
     "no certificates as PEM"),
])  # fmt: skip
def test_options_that_do_not(files: Path, words: list[str], said: str) -> None:
    given = [str(files / word) if word.endswith(".pem") else word for word in words]
    with pytest.raises(ValueError, match=said):
        options(*given)

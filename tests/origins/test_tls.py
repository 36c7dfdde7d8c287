"""TLS: certificates, proxies and long reads."""

import random
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from resource import RUSAGE_THREAD, getrusage

import pytest

from shardcache import ConfigError, threads
from shardcache.origins import connection
from shardcache.origins.http import WebOrigin
from shardcache.urls import parse_url
from tests.support.storetools import PATIENCE, wait_until
from tests.support.tars import make_tar
from tests.support.webservers import Connection, Files, Scripted, answer, running

SHARD = make_tar(11)


def test_an_untrusted_certificate_is_refused(open_cache, context, authority, tmp_path, monkeypatch):
    server = Files()
    server.files = {"/a.tar": SHARD, "/lab/a.tar": SHARD}
    base = server.url.replace("http:", "https:")
    web, caches = f"{base}/a.tar", iter(range(100))

    def read(url: str, **client: object) -> bytes:
        options = {"key": "AK", "secret": "SK", "client_kwargs": client}
        given = {"endpoint_url": base, "storage_options": options, "attempts": 1}
        return open_cache(dir=tmp_path / f"{next(caches)}", **given).open(url).read()

    with running(server, context):
        for url, message in (("s3://lab/a.tar", "AWS_CA_BUNDLE"), (web, "SSL_CERT_FILE")):
            with pytest.raises(ConfigError, match=message):
                read(url)
        for path in authority[0], Path(authority[0]):
            assert read("s3://lab/a.tar", verify=path) == SHARD
        directory = tmp_path / "hashed"
        directory.mkdir()
        (directory / "ca.pem").symlink_to(authority[0])
        subprocess.run(["openssl", "rehash", directory], check=True, capture_output=True)
        files = ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE")
        for name, path in [
            *product(files, [authority[0]]),
            *product(("REQUESTS_CA_BUNDLE", "SSL_CERT_DIR"), [str(directory)]),
        ]:
            with monkeypatch.context() as patched:
                patched.setenv(name, path)
                assert read("s3://lab/a.tar") == read(web) == SHARD, name
        monkeypatch.setenv("AWS_CA_BUNDLE", "/nowhere.pem")
        for url in ("s3://lab/a.tar", web):
            with pytest.raises(ConfigError, match="CURL_CA_BUNDLE or verify names cannot be read"):
                read(url)


def test_credentials_follow_no_redirect_to_plain_http(context, authority, open_cache, serve):
    node = serve(answer("200 OK", SHARD))
    front = Scripted(lambda head: answer("307 Moved", Location=f"{node.url}/lab/a.tar"))
    options = {"key": "AK", "secret": "SK", "client_kwargs": {"verify": authority[0]}}
    with running(front, context):
        cache = open_cache(endpoint_url=front.url, storage_options=options, attempts=1)
        with pytest.raises(ConfigError, match="redirects credentials to a host without TLS"):
            cache.open("s3://lab/a.tar")
    assert not node.heads


def test_tls_requests_share_one_tunnel_through_a_proxy(make_cache, context, authority, monkeypatch):
    class Tunnel(Connection):
        """A proxy that is also the server."""

        def handle(self) -> None:
            super().handle()
            self.request = context.wrap_socket(self.request, server_side=True)
            self.setup()
            for _ in range(3):
                super().handle()

    file = answer("200 OK", SHARD, Connection=None)
    proxy = Scripted(lambda head: b"HTTP/1.1 200 OK\r\n\r\n" if "CONNECT" in head else file)
    proxy.RequestHandlerClass = Tunnel
    monkeypatch.setenv("https_proxy", proxy.url.removeprefix("http://"))
    monkeypatch.setenv("SSL_CERT_FILE", authority[0])
    with running(proxy), make_cache() as cache:
        for name in "abc":
            assert cache.open(f"https://127.0.0.1:9/{name}.tar").read() == SHARD
    firsts = [head.split(" HTTP")[0] for head in proxy.heads]
    assert firsts == ["CONNECT 127.0.0.1:9", "GET /a.tar", "GET /b.tar", "GET /c.tar"]


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize(
    ("size", "step"),
    [
        *((1, 1), (16_384, 16_384), (16_500, 7_000), (300_000, 262_144), (1_088_576, 7_000)),
        ((8 << 20) + 100, 1 << 20),
    ],
)
def test_a_body_comes_whole_and_a_long_one_seldom_wakes_its_reader(
    context, authority, tls, size, step, monkeypatch
):
    """A read waits for no more bytes than come: the server keeps the connection open."""
    monkeypatch.setattr(connection, "_SLICE", 4 * PATIENCE)
    monkeypatch.setenv("SSL_CERT_FILE", authority[0])
    data, whole = random.Random(3).randbytes(size), threading.Event()
    pieces = [data[start : start + 16_384] for start in range(0, size, 16_384)]

    def sent(head: str) -> Iterator[bytes]:
        yield answer("200 OK", Content_Length=size)
        for piece in pieces:
            yield piece
            time.sleep(0.0001)  # until the reader waits again
        ended.append(whole.wait(PATIENCE))  # before the connection is closed

    server, block = Scripted(sent), memoryview(bytearray(step))
    got, ended = list[bytes](), list[bool]()
    with running(server, context if tls else None):
        body = WebOrigin("https", {}, 8 * PATIENCE).open(parse_url(f"{server.url}/a"), 0, None)
        before = getrusage(RUSAGE_THREAD).ru_nvcsw
        while count := body.readinto(block):
            got.append(bytes(block[:count]))
        waits = getrusage(RUSAGE_THREAD).ru_nvcsw - before
        whole.set()
        assert wait_until(lambda: ended) == [True] and b"".join(got) == data
    assert waits < len(pieces) / 2 or step < 1 << 20


def test_no_fork_interrupts_openssl(make_cache, pool, context, authority, monkeypatch):
    """Not in a handshake, nor in the first read, which gets the tickets of the session."""
    may_fork: dict[str, bool] = {}

    def watch(owner: type, name: str) -> None:
        original = getattr(owner, name)

        def watched(*args: object, **options: object) -> object:
            may_fork.setdefault(name, not threads._own.lock._is_owned())
            return original(*args, **options)

        monkeypatch.setattr(owner, name, watched)

    monkeypatch.setenv("SSL_CERT_FILE", authority[0])
    server = Files()
    server.files = {"/a.tar": SHARD}
    with running(server, context):
        watch(ssl.SSLContext, "wrap_bio")
        for name in ("do_handshake", "read"):
            watch(ssl.SSLObject, name)
        fetching = pool.submit(make_cache().fetch, f"{server.url}/a.tar")
        assert fetching.result().size == len(SHARD)
    assert may_fork == dict.fromkeys(("wrap_bio", "do_handshake", "read"), False)

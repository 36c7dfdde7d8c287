"""The servers that benchmarks fetch from: right like S3, and never faster than they say."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from botocore.exceptions import ClientError
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import nginx
from benchmarks.buckets import BUCKET, Workload, archive, write_bucket
from benchmarks.delayline import WINDOW
from benchmarks.linkanswers import ranged
from benchmarks.links import Target, UnavailableError, link, program, target
from benchmarks.linkserver import BURST_SECONDS, CHUNK

SHARDS = Workload("shards", 3, 300 << 10)
BIG = Workload("big", 1, 9 << 20)  # above the size of a part: its ETag is no MD5
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("objects")
    write_bucket(home, [SHARDS, BIG])
    return home


@pytest.fixture(scope="module")
def fast(objects: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with link(objects, tmp_path_factory.mktemp("link"), log=True) as running:
        yield running


def content(objects: Path, key: str) -> bytes:
    return (objects / BUCKET / key).read_bytes()


@contextlib.contextmanager
def connection(endpoint: str) -> Iterator[http.client.HTTPConnection]:
    place = urlsplit(endpoint)
    made = http.client.HTTPConnection(place.hostname, place.port, timeout=60)
    with contextlib.closing(made):
        yield made


def ask(
    open_connection: http.client.HTTPConnection, key: str, method: str = "GET", **fields: str
) -> tuple[int, bytes, dict[str, str]]:
    headers = {name.replace("_", "-"): value for name, value in fields.items()}
    open_connection.request(method, f"/{BUCKET}/{key}", headers=headers)
    answer = open_connection.getresponse()
    return answer.status, answer.read(), {k.lower(): v for k, v in answer.getheaders()}


def s3_client(endpoint: str):
    import botocore.session
    from botocore.config import Config

    return botocore.session.Session().create_client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id="anybody",
        aws_secret_access_key="whatever",
        config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1}),
    )


def test_an_object_is_a_tar_archive_of_exactly_the_size_asked_for(tmp_path: Path) -> None:
    import tarfile

    for size in (2048, 100 << 10, (3 << 20) + 512):
        path = tmp_path / f"{size}.tar"
        path.write_bytes(b"".join(archive(path.name, size)))
        assert path.stat().st_size == size
        with tarfile.open(path) as opened:
            (member,) = opened.getmembers()
            assert member.size == size - 512 - 1024


def test_objects_of_two_names_have_different_bytes() -> None:
    first, second = (b"".join(archive(name, 1 << 20)) for name in ("a", "b"))
    assert first != second


@pytest.mark.parametrize(
    ("asked", "start", "stop"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=100-199", 100, 200),
        ("bytes=307000-", 307_000, 307_200),
        ("bytes=307199-999999", 307_199, 307_200),
        ("bytes=-10", 307_190, 307_200),
        ("bytes=-999999", 0, 307_200),
    ],
)
def test_a_range_is_answered_with_just_its_bytes(
    fast: Target, objects: Path, asked: str, start: int, stop: int
) -> None:
    data = content(objects, SHARDS.keys[0])
    with connection(fast.endpoint) as opened:
        status, body, fields = ask(opened, SHARDS.keys[0], Range=asked)
    assert (status, body) == (206, data[start:stop])
    assert fields["content-range"] == f"bytes {start}-{stop - 1}/{len(data)}"


@given(
    size=st.integers(1, 10_000),
    first=st.none() | st.integers(0, 12_000),
    last=st.none() | st.integers(0, 12_000),
)
@settings(max_examples=300)
def test_no_range_leads_outside_of_the_object(
    size: int, first: int | None, last: int | None
) -> None:
    header = f"bytes={'' if first is None else first}-{'' if last is None else last}"
    answer = ranged({"range": header}, size, '"e"', "now")
    if answer.status == 416:
        assert first is not None or last == 0
        return
    assert answer.status == (200 if first is None and last is None else 206)
    assert 0 <= answer.start < answer.stop <= size
    if first is not None:
        assert answer.start == first
        assert answer.stop == min(size, size if last is None else last + 1)


def test_a_range_behind_the_end_is_refused(fast: Target) -> None:
    with connection(fast.endpoint) as opened:
        status, _, fields = ask(opened, SHARDS.keys[0], Range="bytes=307200-")
        assert (status, fields["content-range"]) == (416, "bytes */307200")
        # The connection goes on behind a refusal.
        assert ask(opened, SHARDS.keys[0])[0] == 200


def test_if_match_lets_just_this_version_through(fast: Target) -> None:
    with connection(fast.endpoint) as opened:
        etag = ask(opened, BIG.keys[0], "HEAD")[2]["etag"]
        assert ask(opened, BIG.keys[0], If_Match=etag, Range="bytes=0-9")[0] == 206
        for fields in ({}, {"Range": "bytes=0-9"}):
            status, body, _ = ask(opened, BIG.keys[0], If_Match='"other"', **fields)
            assert status == 412
            assert b"PreconditionFailed" in body


def test_another_object_under_the_same_name_has_another_etag(fast: Target, objects: Path) -> None:
    path = objects / BUCKET / "changing.tar"
    etags = set()
    try:
        with connection(fast.endpoint) as opened:
            for number in range(3):
                path.write_bytes(bytes([number]) * 1000)
                etags.add(ask(opened, "changing.tar", "HEAD")[2]["etag"])
    finally:
        path.unlink()
    assert len(etags) == 3


def test_head_tells_the_size_and_sends_nothing(fast: Target) -> None:
    with connection(fast.endpoint) as opened:
        status, body, fields = ask(opened, SHARDS.keys[0], "HEAD")
        assert (status, body, fields["content-length"]) == (200, b"", str(SHARDS.size))
        assert ask(opened, SHARDS.keys[1])[0] == 200


@pytest.mark.parametrize("key", ["missing.tar", "shards", "../outside.tar", "..%2Foutside.tar"])
def test_what_is_no_object_is_not_found(fast: Target, objects: Path, key: str) -> None:
    (objects / "outside.tar").write_bytes(b"not in the bucket")
    with connection(fast.endpoint) as opened:
        status, body, _ = ask(opened, key)
    assert (status, b"NoSuchKey" in body) == (404, True)


def test_a_listing_has_every_key_once_whatever_the_page(fast: Target) -> None:
    client = s3_client(fast.endpoint)
    pages = client.get_paginator("list_objects_v2").paginate(
        Bucket=BUCKET, PaginationConfig={"PageSize": 2}
    )
    found = [row for page in pages for row in page.get("Contents", [])]
    assert [row["Key"] for row in found] == sorted([*BIG.keys, *SHARDS.keys])
    assert {row["Size"] for row in found} == {SHARDS.size, BIG.size}
    assert found[0]["ETag"] == client.head_object(Bucket=BUCKET, Key=BIG.keys[0])["ETag"]
    grouped = client.list_objects_v2(Bucket=BUCKET, Delimiter="/")
    assert [row["Prefix"] for row in grouped["CommonPrefixes"]] == ["big/", "shards/"]
    assert "Contents" not in grouped
    with pytest.raises(ClientError, match="NoSuchBucket"):
        client.list_objects_v2(Bucket="nowhere")


def test_fetches_are_counted_by_the_first_byte(objects: Path, tmp_path: Path) -> None:
    with link(objects, tmp_path, log=True) as running, connection(running.endpoint) as opened:
        ask(opened, SHARDS.keys[0])
        ask(opened, SHARDS.keys[0], Range="bytes=0-99")
        ask(opened, SHARDS.keys[0], Range="bytes=100-199")
        ask(opened, SHARDS.keys[1], "HEAD")
        ask(opened, "missing.tar")
        assert running.object_fetches() == {SHARDS.keys[0]: 2}


def test_every_answer_takes_at_least_the_delay(objects: Path, tmp_path: Path) -> None:
    delay = 0.05
    with (
        link(objects, tmp_path, delay=delay) as running,
        connection(running.endpoint) as opened,
    ):
        for method, key in (("GET", SHARDS.keys[0]), ("HEAD", BIG.keys[0]), ("GET", "missing")):
            begun = time.monotonic()
            ask(opened, key, method)
            assert time.monotonic() - begun >= delay


def test_a_connection_is_never_faster_than_its_rate(objects: Path, tmp_path: Path) -> None:
    rate = 4e6
    with link(objects, tmp_path, rate=rate) as running, connection(running.endpoint) as opened:
        begun = time.monotonic()
        received = 0
        # Several answers of one connection: the rate is the connection's, not the answer's.
        for key in (*SHARDS.keys, *SHARDS.keys):
            received += len(ask(opened, key)[1])
        seconds = time.monotonic() - begun
    assert received == 2 * SHARDS.total
    assert seconds >= (received - CHUNK) / rate - BURST_SECONDS


def test_several_processes_serve_one_port(objects: Path, tmp_path: Path) -> None:
    with link(objects, tmp_path, processes=3) as running:
        for _ in range(12):
            with connection(running.endpoint) as opened:
                assert ask(opened, SHARDS.keys[0])[1] == content(objects, SHARDS.keys[0])


def test_a_line_takes_a_round_trip_and_changes_no_byte(fast: Target, objects: Path) -> None:
    one_way = 0.02
    port = fast.endpoint.rpartition(":")[2]
    with program("benchmarks.delayline", "--to", port, "--delay", f"{one_way}") as far:
        begun = time.monotonic()
        with connection(f"http://127.0.0.1:{far}") as opened:
            assert ask(opened, BIG.keys[0])[1] == content(objects, BIG.keys[0])
            # The handshake's round trip and the request's own.
            assert time.monotonic() - begun >= 4 * one_way
            begun = time.monotonic()
            assert ask(opened, SHARDS.keys[0])[1] == content(objects, SHARDS.keys[0])
            assert time.monotonic() - begun >= 2 * one_way


def test_a_line_holds_a_window_and_no_more() -> None:
    """A client that reads nothing must stop the server, not fill the memory."""
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = str(server.getsockname()[1])
        with (
            program("benchmarks.delayline", "--to", port, "--delay", "0") as far,
            contextlib.closing(socket.create_connection(("127.0.0.1", far))),
        ):
            accepted, _ = server.accept()
            accepted.settimeout(2.0)
            sent = 0
            with contextlib.closing(accepted), pytest.raises(TimeoutError):
                while sent < 20 * WINDOW:
                    sent += accepted.send(bytes(1 << 20))
    assert sent >= WINDOW


def test_a_line_ends_both_sides_with_either(objects: Path) -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = str(server.getsockname()[1])
        with program("benchmarks.delayline", "--to", port, "--delay", "0.001") as far:
            client = socket.create_connection(("127.0.0.1", far), timeout=30)
            accepted, _ = server.accept()
            accepted.settimeout(30)
            client.close()
            with contextlib.closing(accepted):
                assert accepted.recv(10) == b""


def test_a_server_ends_with_who_started_it(objects: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.linkserver", "--root", str(objects)]
    process = subprocess.Popen(
        [*command, "--processes", "2"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    )
    assert process.stdin is not None and process.stdout is not None
    port = int(process.stdout.readline())
    process.stdin.close()  # as the kernel does it for a process that was killed
    assert process.wait(60) == 0
    process.stdout.close()
    deadline = time.monotonic() + 60
    with pytest.raises(ConnectionRefusedError):
        while time.monotonic() < deadline:
            with contextlib.suppress(ConnectionResetError):  # it ends just then
                socket.create_connection(("127.0.0.1", port)).close()


def test_nginx_serves_the_same_with_and_without_tls(objects: Path, tmp_path: Path) -> None:
    if (reason := nginx.unavailable()) is not None:
        pytest.skip(reason)
    key = SHARDS.keys[0]
    with target("nginx", objects, tmp_path) as plain:
        assert urllib.request.urlopen(plain.http_url(key)).read() == content(objects, key)
    with target("nginx-tls", objects, tmp_path) as secure:
        trust = ssl.create_default_context(cafile=secure.authority)
        with urllib.request.urlopen(secure.http_url(key), context=trust) as answer:
            assert answer.read() == content(objects, key)
        with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
            urllib.request.urlopen(secure.http_url(key))
    assert list(tmp_path.iterdir()) == []


def test_without_nginx_the_target_says_so(
    objects: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nginx, "_program", lambda: None)
    with (
        pytest.raises(UnavailableError, match="nginx is not installed"),
        target("nginx", objects, tmp_path),
    ):
        pass


def test_a_network_of_its_own_has_a_loopback_that_works() -> None:
    code = (
        "import socket\nfrom benchmarks import network\nsaid = network.enter()\n"
        "server = socket.create_server(('127.0.0.1', 0))\n"
        "socket.create_connection(server.getsockname(), timeout=30).close()\nprint(said)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env={**os.environ}
    )
    assert done.returncode == 0, done.stderr
    assert "congestion control" in done.stdout


def test_many_connections_at_once_get_their_own_bytes(fast: Target, objects: Path) -> None:
    wrong: list[str] = []

    def work(number: int) -> None:
        key = SHARDS.keys[number % SHARDS.count]
        with connection(fast.endpoint) as opened:
            for _ in range(5):
                if ask(opened, key)[1] != content(objects, key):
                    wrong.append(key)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []

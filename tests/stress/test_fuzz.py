"""Random damage on the disk, and random responses of a server."""

import os
import random
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from shardcache import Cache
from shardcache.errors import ShardCacheError
from tests.support.tars import make_tar

#: A factor for the number of examples.
TRIES = int(os.environ.get("FUZZ", "1"))


SHARDS = {f"{number}.tar": make_tar(number, 2 + 2 * number, 200) for number in range(3)}
SHARDS["big.tar"] = make_tar(9, 700, 1500)  # of several blocks
KINDS = ["flip", "flip", "flip", "cut", "grow", "noise", "gone", "link", "pipe", "directory"]


def spoil(path, kind, draw):
    """Damage a file, or put something else in its place."""
    content = bytearray(path.read_bytes())
    path.unlink()
    if kind == "link":
        path.symlink_to("/nowhere")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind != "gone":
        if kind == "flip" and content:
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        elif kind == "cut":
            del content[draw.randrange(len(content) + 1) :]
        elif kind == "grow":
            content += draw.randbytes(draw.randrange(1, 2000))
        elif kind == "noise":
            content = draw.randbytes(draw.randrange(2000))
        path.write_bytes(content)


@pytest.mark.parametrize("seed", range(25 * TRIES))
def test_reads_from_a_damaged_cache_are_right_and_repair_it(seed, tmp_path, monkeypatch):
    draw, root, origin = random.Random(seed), tmp_path / "cache", tmp_path / "origin"
    origin.mkdir()
    for name, data in SHARDS.items():
        (origin / name).write_bytes(data)
    modules = [each for name, each in sys.modules.items() if name.startswith("shardcache")]
    for step in range(12):
        # As after a reboot: entries must be verified.
        for module in [each for each in modules if hasattr(each, "boot_id")]:
            monkeypatch.setattr(module, "boot_id", lambda step=step: f"boot-{seed}-{step}")
        with Cache(root, min_free=0, attempts=1, cache_local=True) as cache:
            for name in draw.sample(sorted(SHARDS), 2):
                with cache.open(f"file://{origin}/{name}") as stream:
                    most = draw.choice((-1, 1000))
                    assert stream.read(most) == SHARDS[name][: most if most > 0 else None]
            if draw.random() < 0.2 and (root / "manifest.json").is_file():
                try:
                    cache.clean(everything=draw.random() < 0.5)
                except OSError as exn:  # a link or a directory in place of the lock file
                    lock = Path(exn.filename)
                    assert lock.parent.name == "locks" and (lock.is_symlink() or lock.is_dir())
        assert sorted(os.listdir(tmp_path)) == ["cache", "origin"]
        files = sorted(p for p in root.rglob("*") if p.is_file() and not p.is_symlink())
        if draw.random() < 0.6:  # of an entry
            files = [path for path in files if "objects" in path.parts]
        path, kind = draw.choice([*files, None]), draw.choice(KINDS)
        # The cache refuses other kinds of manifests.
        if path and (path.name != "manifest.json" or kind not in ("link", "pipe", "directory")):
            spoil(path, kind, draw)


HEADERS = {
    "Content-Length": ["0", "10", "100", "-5", "abc", "1e3", "9" * 5000, "", "10, 10", "٣"],
    "Content-Range": ["bytes 0-9/100", "bytes 10-9/10", "bytes 0-9/*", "x", "9" * 5000, "٣"],
    "ETag": ['"v1"', "", 'W/"v1"', "\\", "x" * 9000, "\x7f"],
    "Last-Modified": ["Mon, 01 Jan 2024 00:00:00 GMT", "never", "", "0", "9" * 400],
    "Content-Encoding": ["gzip", "identity", "br, gzip"],
    "Transfer-Encoding": ["chunked", "gzip, chunked", "x"],
    "Location": ["/b", "http://[::1", "ftp://h/x", "//", "\t", "http://h:99999/", "?" * 99],
    "Retry-After": ["0", "nan", "inf", "-1", "1e400", "Mon"],
}
STATUS = [200, 200, 206, 206, 206, 204, 301, 302, 304, 400, 403, 404, 412, 416, 429, 500, 503, 999]
BODIES = [b"x" * 10, b"", b"<Error><Code>SlowDown</Code></Error>", b"<" * 50, b"\xff" * 30]

answers = st.builds(
    lambda status, headers, body, cut: (
        f"HTTP/1.1 {status} x\r\n".encode()
        + b"".join(f"{n}: {v}\r\n".encode() for n, v in headers.items())
        + b"Connection: close\r\n\r\n"
        + body
    )[: cut or None],
    st.sampled_from(STATUS),
    st.fixed_dictionaries(
        {}, optional={name: st.sampled_from(values) for name, values in HEADERS.items()}
    ),
    st.sampled_from(BODIES) | st.binary(max_size=30),
    st.sampled_from([0, 0, 0, 20, 60]),
)


@pytest.fixture
def server(serve):
    return serve(b"")


@given(answer=answers | st.binary(max_size=60))
@example(b"HTTP/1.1 200 x\r\nContent-Length: -5\r\n\r\nxxxxx")
@example(b"HTTP/1.1 301 x\r\nTransfer-Encoding: chunked\r\n\r\nxxxxx")
@example(b"HTTP/1.1 206 x\r\nContent-Range: bytes 0-9/" + b"9" * 5000 + b"\r\n\r\n")
@settings(max_examples=100 * TRIES, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_response_breaks_the_cache(server, answer):
    server.answer = lambda head: answer
    with tempfile.TemporaryDirectory() as home:
        cache = Cache(home + "/cache", min_free=0, attempts=1, timeout=5.0, prefetch=0)
        with cache, suppress(ShardCacheError), cache.open(f"{server.url}/a.tar") as stream:
            assert len(stream.read()) < 300

"""Random damage on the disk, and random responses of a server."""

import os
import random
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from shardcache import Cache
from shardcache.errors import ShardCacheError
from tests.support.tars import make_tar

#: A factor for the number of examples.
TRIES = int(os.environ.get("FUZZ", "1"))


SHARDS = {f"{number}.tar": make_tar(number, 2 + 2 * number, 200) for number in range(3)}
SHARDS["big.tar"] = make_tar(9, 700, 1500)  # of several blocks
KINDS = ["flip", "flip", "flip", "cut", "grow", "noise", "gone", "link", "pipe", "directory"]
names = st.sampled_from(sorted(SHARDS))


class DamagedCache(RuleBasedStateMachine):
    """Damages files of a cache at random; every read has the right bytes, and repairs its shard."""

    boots = 0

    def __init__(self):
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.home = Path(tempfile.mkdtemp(prefix="shardcache-fuzz-"))
        self.root = self.home / "cache"
        (self.home / "origin").mkdir()
        for name, data in SHARDS.items():
            (self.home / "origin" / name).write_bytes(data)
        self.cache: Cache | None = None
        self.reboot()

    def teardown(self):
        self.cache.close()
        shutil.rmtree(self.home)
        self.patch.undo()

    def reboot(self):
        """Open the cache again, as after a reboot: entries must be verified."""
        if self.cache is not None:
            self.cache.close()
        DamagedCache.boots += 1
        boot = f"boot-{DamagedCache.boots}"
        for name, module in list(sys.modules.items()):
            if name.startswith("shardcache") and hasattr(module, "boot_id"):
                self.patch.setattr(module, "boot_id", lambda: boot)
        self.cache = Cache(self.root, min_free=0, attempts=1, cache_local=True)

    def url(self, name):
        return f"file://{self.home}/origin/{name}"

    @rule(name=names)
    def read(self, name):
        with self.cache.open(self.url(name)) as stream:
            assert stream.read() == SHARDS[name]

    @rule(name=names)
    def leave(self, name):
        """Read the beginning, and close the stream."""
        with self.cache.open(self.url(name)) as stream:
            assert stream.read(1000) == SHARDS[name][:1000]

    @rule(kind=st.sampled_from(KINDS), seed=st.integers(0, 1 << 30))
    def damage(self, kind, seed):
        """Damage any file of the root."""
        self.reboot()  # ends downloads, which would remove files while they are listed
        files = sorted(p for p in self.root.rglob("*") if p.is_file() and not p.is_symlink())
        path = files[seed % len(files)] if files else None
        if path and (path.name != "manifest.json" or kind not in ("link", "pipe", "directory")):
            self.spoil(path, kind, seed)  # the cache refuses other kinds of manifests

    @rule(name=names, meta=st.booleans(), kind=st.sampled_from(KINDS), seed=st.integers(0, 1 << 30))
    def damage_and_read(self, name, meta, kind, seed):
        """Damage a file that is read next."""
        self.read(name)
        if path := self.cache.path(self.url(name)):  # None if it was streamed
            self.spoil(path.with_name("meta.json") if meta else path, kind, seed)
            self.read(name)

    def spoil(self, path, kind, seed):
        draw = random.Random(seed)
        content = bytearray(path.read_bytes())
        if kind == "flip" and content:
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        elif kind == "cut":
            del content[draw.randrange(len(content) + 1) :]
        elif kind == "grow":
            content += draw.randbytes(draw.randrange(1, 2000))
        elif kind == "noise":
            content = bytearray(draw.randbytes(draw.randrange(2000)))
        path.unlink()
        if kind == "link":
            path.symlink_to(self.home / "nowhere")
        elif kind == "pipe":
            os.mkfifo(path)
        elif kind == "directory":
            path.mkdir()
        elif kind != "gone":
            path.write_bytes(content)
        self.reboot()

    @rule(everything=st.booleans())
    def clean(self, everything):
        if (self.root / "manifest.json").is_file():
            try:
                self.cache.clean(everything=everything)
            except OSError as exn:  # a link or a directory in place of the lock file
                lock = Path(exn.filename)
                assert lock.parent.name == "locks" and (lock.is_symlink() or lock.is_dir())

    @invariant()
    def nothing_was_written_outside(self):
        assert sorted(os.listdir(self.home)) == ["cache", "origin"][not self.root.exists() :]


DamagedCache.TestCase.settings = settings(
    max_examples=25 * TRIES,
    stateful_step_count=12,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestDamagedCache = DamagedCache.TestCase


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

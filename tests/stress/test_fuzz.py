"""Any bytes, wherever bytes are read: the documented error or a right answer, never else.

The same targets are fuzzed for longer by ``python -m tests.stress.fuzz``.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import random
import re
import shutil
import subprocess
import sys
import tempfile
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from shardcache import Cache, ConfigError, ShardCacheError
from shardcache import config as configuration
from shardcache.files import PRIVATE
from shardcache.layout import MANIFEST, META, read_file
from shardcache.locks.flock import read_holder
from shardcache.origins.base import ObjectInfo, TransientError, VersionChangedError
from shardcache.store.entry import MAX_BYTES, DamagedError, Entry
from shardcache.store.partial import read_progress, read_records
from shardcache.store.root import check_group, make_root
from tests.origins.test_rangebody import Scripted
from tests.stress.fuzzing import TARGETS
from tests.support.fakes import Fault, MemoryOrigin
from tests.support.storetools import PATIENCE
from tests.support.tars import make_tar

MIB = 1 << 20


# -- parsers -------------------------------------------------------------------


@st.composite
def bent(draw: st.DrawFn, seeds: list[bytes]) -> bytes:
    """A seed with some of its bytes changed, moved, left out or repeated."""
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(0, 6))):
        at = draw(st.integers(0, len(data)))
        to = min(len(data), at + draw(st.integers(0, 40)))
        piece = draw(
            st.binary(max_size=8)
            | st.sampled_from([b'"', b"\\", b"\0", b"\n", b"?", b"NaN", b"-1", b"9" * 30, b"[" * 9])
            | st.just(bytes(data[at:to]) * 2)
        )
        data[at:to] = piece
    return bytes(data)


@pytest.mark.parametrize("name", TARGETS)
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_no_bytes_are_more_than_a_parser_can_take(name: str, data: st.DataObject) -> None:
    target, seeds = TARGETS[name]
    target(data.draw(bent(seeds) | st.binary(max_size=200)))


@pytest.mark.parametrize("name", TARGETS)
def test_what_a_target_begins_with_is_what_it_accepts(name: str) -> None:
    target, seeds = TARGETS[name]
    for seed in seeds:
        target(seed)
    # No length hurts. Python refuses to make numbers of more than 4300 digits.
    for piece in (b"\0", b"[", b"9", b"?", b"/", b"::", seeds[0]):
        target((piece * 64 * 1024)[: 64 * 1024])
    for at in (b"9", b"0-9", b"10", b"100", b"3"):
        for seed in seeds:
            target(seed.replace(at, b"9" * 5000))


@given(data=bent([b'dir = "/x"\nmax_size = "8GB"\n[storage_options]\nkey = "a"\n']))
@settings(max_examples=100, deadline=None)
def test_a_configuration_file_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.toml"
    path.write_bytes(data)
    with contextlib.suppress(ConfigError):
        configuration.load({"dir": "/x"}, {}, [path])


@given(data=bent([b'{"schema": 1, "layouts": ["v1"], "id": "abc", "shared_group": 7}\n']))
@settings(max_examples=60, deadline=None)
def test_a_manifest_is_understood_or_passed_over(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    root = tmp_path_factory.getbasetemp() / "fuzzed-root"
    if not root.exists():
        make_root(root, "1")
    (root / MANIFEST).write_bytes(data)
    with contextlib.suppress(ConfigError):
        check_group(root, PRIVATE)
        make_root(root, "1")


def test_a_file_of_any_size_costs_a_bounded_amount_of_memory(tmp_path: Path) -> None:
    for name in (META, "progress", "key.lock", MANIFEST):
        with open(tmp_path / name, "wb") as file:
            file.write(TARGETS["progress"][1][0])
            file.truncate(1 << 42)  # 4 TiB of nothing
    tracemalloc.start()
    try:
        with pytest.raises(DamagedError):
            Entry(str(tmp_path), "", "", 0, 0.0).metadata()
        assert read_progress(tmp_path) is not None
        assert read_holder(tmp_path / "key.lock") is None
        check_group(tmp_path, PRIVATE)
        with open(tmp_path / "progress", "rb") as file:
            records = [index for index, _, _ in read_records(file.fileno(), 1 << 60)]
        assert records == [0]
        assert len(read_file(tmp_path / META, MAX_BYTES)) == MAX_BYTES
        assert tracemalloc.get_traced_memory()[1] < 4 * MIB
    finally:
        tracemalloc.stop()


# -- the network ---------------------------------------------------------------

HEADERS = {
    "Content-Length": ["0", "10", "100", "-5", "abc", "1e3", "9" * 5000, "", "10, 10", "٣"],
    "Content-Range": ["bytes 0-9/100", "bytes 10-9/10", "bytes 0-9/*", "x", "9" * 5000, "٣"],
    "ETag": ['"v1"', "", 'W/"v1"', "\\", "x" * 9000, "\x7f"],
    "Last-Modified": ["Mon, 01 Jan 2024 00:00:00 GMT", "never", "", "0", "9" * 400],
    "Content-Encoding": ["gzip", "identity", "br, gzip"],
    "Transfer-Encoding": ["chunked", "gzip, chunked", "x"],
    "Location": ["/b", "http://[::1", "ftp://h/x", "//", "\t", "http://h:99999/", "?" * 99],
    "Retry-After": ["1", "nan", "inf", "-1", "1e400", "Mon"],
    "x-amz-checksum-crc32": ["AAAAAA==", "!", ""],
    "x-amz-version-id": ["null", "v1", ""],
    "x-amz-bucket-region": ["eu-1", "\\", ""],
    "Content-Type": ["application/xml", "text/html", "\x00"],
}
STATUS = [200, 200, 206, 206, 206, 204, 301, 302, 304, 400, 403, 404, 412, 416, 429, 500, 503, 999]
BODIES = [b"x" * 10, b"", b"<Error><Code>SlowDown</Code></Error>", b"<" * 50, b"\xff" * 30]
EXPECTED = (ShardCacheError, TransientError, VersionChangedError)

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


@pytest.fixture(scope="module")
def speaker():
    """A server that says whatever it is told to."""
    import threading

    server = Scripted(lambda head: b"")
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(PATIENCE)


@pytest.mark.parametrize("kind", ["web", "s3"])
def test_no_answer_is_more_than_an_origin_can_take(speaker: Scripted, kind: str) -> None:
    from shardcache.origins.http import WebOrigin
    from shardcache.origins.s3 import S3Origin
    from shardcache.urls import parse_url

    if kind == "web":
        origin: WebOrigin | S3Origin = WebOrigin(connections=2, timeout=PATIENCE)
        url = parse_url(f"{speaker.url}/a.tar")
    else:
        paths = {"key": "a", "secret": "b", "config_kwargs": {"s3": {"addressing_style": "path"}}}
        origin = S3Origin(paths, endpoint_url=speaker.url, connections=2, timeout=PATIENCE)
        url = parse_url("s3://lab/a.tar", endpoint=speaker.url)
    buffer = memoryview(bytearray(100))
    outcomes: set[str] = set()

    @given(answer=answers | st.binary(max_size=60), pinned=st.booleans())
    @example(b"HTTP/1.1 200 x\r\nContent-Length: -5\r\n\r\nxxxxx", False)
    @example(b"HTTP/1.1 301 x\r\nTransfer-Encoding: chunked\r\n\r\nxxxxx", False)
    @example(b"HTTP/1.1 503 x\r\nTransfer-Encoding: chunked\r\n\r\n", True)
    @example(b"HTTP/1.1 200 x\r\nLast-Modified: " + b"9" * 400 + b"\r\n\r\n", False)
    @example(b"HTTP/1.1 206 x\r\nContent-Range: bytes 0-9/" + b"9" * 5000 + b"\r\n\r\n", True)
    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
    def ask(answer: bytes, pinned: bool) -> None:
        speaker.answer = lambda head: answer
        pin = ObjectInfo(100, '"v1"') if pinned else None
        for call in (lambda: origin.open(url, 0, 10, pin), lambda: origin.stat(url)):
            try:
                found = call()
                if isinstance(found, ObjectInfo):
                    info = found
                else:
                    info = found.info
                    received = 0
                    try:
                        while count := found.readinto(buffer):
                            received += count
                            assert received <= 200
                        assert found.stop is None or received == found.stop - found.start
                    finally:
                        found.close()
                assert info.size is None or info.size >= 0
                assert len(info.version) == 24
                outcomes.add("answered")
            except EXPECTED as exn:
                assert len(str(exn)) < 12_000
                outcomes.add(type(exn).__name__)

    ask()
    assert {"answered", "TransientError"} <= outcomes  # it was not all refused at the door


# -- a whole cache ---------------------------------------------------------------

SHARDS = {f"s3://lab/{n}.tar": make_tar(n, 2 + 2 * n, 200) for n in range(4)}
BIG = "s3://lab/0.tar"
SHARDS[BIG] = make_tar(0, 700, 1500)  # three blocks: something to resume


KINDS = ["flip", "flip", "flip", "cut", "grow", "noise", "gone", "link", "pipe", "directory"]


class DamagedCache(RuleBasedStateMachine):
    """Files of a real root are damaged at random; reading goes on, and heals what it meets."""

    boots = 0

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()

    @initialize()
    def make(self) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="shardcache-fuzz-"))
        self.root = self.home / "cache"
        self.reboot()

    def teardown(self) -> None:
        with contextlib.suppress(AttributeError):
            self.cache.close()
            shutil.rmtree(self.home)
        self.patch.undo()  # or all later tests of this process would run after another boot

    @rule()
    def reboot(self) -> None:
        """Another process, after a reboot: nothing is trusted unseen."""
        with contextlib.suppress(AttributeError):
            self.cache.close()
        DamagedCache.boots += 1
        boot = f"boot-{DamagedCache.boots}"
        for module in ("store", "intake"):
            self.patch.setattr(f"shardcache.{module}.boot_id", lambda: boot)
        self.origin = MemoryOrigin(objects=dict(SHARDS))
        self.cache = Cache(self.root, min_free=0, attempts=1)
        process = self.cache._here()
        process.coordinator()
        process.origins.add("s3", self.origin)

    @rule(url=st.sampled_from(sorted(SHARDS)))
    def read(self, url: str) -> None:
        with self.cache.open(url) as stream:
            assert stream.read() == SHARDS[url]

    @rule()
    def fetch_half(self) -> None:
        """Leave something to resume."""
        self.cache.remove(BIG)
        self.origin.faults.append(Fault(after=2 * MIB + 1))
        with contextlib.suppress(ShardCacheError):
            self.cache.fetch(BIG)
        self.origin.faults.clear()

    @rule(which=st.integers(0, 1 << 20), kind=st.sampled_from(KINDS), seed=st.integers(0, 1 << 30))
    def damage(self, which: int, kind: str, seed: int) -> None:
        """Any file of the root; which there are is chance, so it does not decide what is drawn."""
        files = sorted(p for p in self.root.rglob("*") if p.is_file() and not p.is_symlink())
        if not files:
            return
        path = files[which % len(files)]
        if path.name == MANIFEST and kind in ("link", "pipe", "directory"):
            return  # refused, see test_security
        self.spoil(path, kind, seed)
        self.reboot()

    @rule(
        url=st.sampled_from(sorted(SHARDS)),
        sidecar=st.booleans(),
        kind=st.sampled_from(KINDS),
        seed=st.integers(0, 1 << 30),
    )
    def damage_and_read(self, url: str, sidecar: bool, kind: str, seed: int) -> None:
        """What is read back next."""
        self.read(url)
        found = [e for e in self.cache.entries() if e.key == self.cache.parse(url).key]
        if found:  # else something else is where it should be, and it was streamed
            self.spoil(found[0].path / META if sidecar else found[0].data, kind, seed)
            self.reboot()
            self.read(url)

    def spoil(self, path: Path, kind: str, seed: int) -> None:
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

    @rule()
    def clean(self) -> None:
        if (self.root / MANIFEST).is_file():
            self.cache.clean()

    @rule()
    def clean_all(self) -> None:
        if (self.root / MANIFEST).is_file():
            self.cache.clean(everything=True)
            assert list(self.cache.entries()) == []

    @rule(url=st.sampled_from(sorted(SHARDS)))
    def heal(self, url: str) -> None:
        """What was damaged is fetched once, and is a hit from then on."""
        self.read(url)
        before = len(self.origin.requests)
        self.read(url)
        assert len(self.origin.requests) == before

    @invariant()
    def nothing_was_written_outside(self) -> None:
        if hasattr(self, "home"):
            assert [path.name for path in self.home.iterdir()] == ["cache"]


DamagedCache.TestCase.settings = settings(
    max_examples=30,
    stateful_step_count=12,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


class TestDamagedCache(DamagedCache.TestCase):
    pass


# -- libFuzzer -----------------------------------------------------------------

_HAS_WHEEL = (
    sys.platform == "linux" and platform.machine() == "x86_64" and sys.version_info < (3, 14)
)


@pytest.mark.skipif(
    not _HAS_WHEEL, reason="atheris has wheels for Linux on x86-64 and Python to 3.13 only"
)
def test_the_fuzzer_runs_and_finds_nothing() -> None:
    assert importlib.util.find_spec("atheris"), "the extra 'test' is not installed"
    done = subprocess.run(
        [sys.executable, "-m", "tests.stress.fuzz", "--seconds", "5", "sidecar", "url"],
        capture_output=True,
        text=True,
        timeout=PATIENCE * 2,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    tried = re.search(r"(\d+) inputs, nothing found", done.stdout)
    assert tried and int(tried[1]) > 100


def test_the_fuzzer_tells_when_it_finds_something(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from tests.stress import fuzz

    def fail(command: list[str], stdout: object, stderr: object) -> subprocess.CompletedProcess:
        stdout.write("AssertionError: input 0x41")
        return subprocess.CompletedProcess(command, 77)

    monkeypatch.setattr(fuzz.subprocess, "run", fail)
    assert fuzz.main(["--seconds", "5", "--corpus", str(tmp_path), "url"]) == 1
    assert "url: FAILED" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        fuzz.main(["nothing"])

"""Fixtures for all tests: a real S3 server, a proxy in front of it, an origin in memory."""

import os
import shutil
import signal
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from fsspec.implementations.local import LocalFileOpener

from examples.demo import S3Server
from shardcache.cache import Cache
from shardcache.config import Config
from shardcache.layout import Layout, read_manifest
from shardcache.locks.mounts import node_namespace
from shardcache.origins import retry
from shardcache.store.root import make_root
from tests.support.fakes import FakeClock, MemoryOrigin
from tests.support.proxy import Proxy
from tests.support.shop import Shop
from tests.support.webservers import Files, Scripted, running


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """One SeaweedFS for the whole run."""
    with S3Server(directory=tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def serve() -> Iterator[Callable[..., Scripted]]:
    """Start servers that send a fixed response, or compute it from the request's head."""
    with ExitStack() as stack:

        def start(answer: bytes | Callable[[str], bytes], most: int = 1) -> Scripted:
            respond = answer if callable(answer) else lambda head: answer
            return stack.enter_context(running(Scripted(respond, most)))

        yield start


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The files of a certificate for 127.0.0.1, which signs itself, and of its key."""
    if shutil.which("openssl") is None:
        pytest.skip("the openssl command makes the certificate")
    home = tmp_path_factory.mktemp("tls")
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 "
        "-subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1 -keyout key.pem -out ca.pem"
    )
    subprocess.run(command.split(), cwd=home, check=True, capture_output=True)
    return str(home / "ca.pem"), str(home / "key.pem")


@pytest.fixture(scope="session")
def context(authority: tuple[str, str]) -> ssl.SSLContext:
    """TLS of a server with this certificate."""
    found = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    found.load_cert_chain(*authority)
    return found


@pytest.fixture
def files() -> Iterator[Scripted]:
    with running(Files()) as server:
        yield server


def pytest_configure(config: pytest.Config) -> None:
    """Handle SIGINT: a background job of a script ignores it, and so would its children."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


#: Slow files start first, so that no process idles at the end.
LONG = {"test_run.py", "test_demo.py", "test_examples.py", "test_processes.py", "test_wds.py"}
#: Claims of locks that do not hold with a broken flock; see tests/stress/brokensite.
UNTRUE = {"refused": {"flock", "answers"}, "lying": {"flock"}}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONG)
    untrue = UNTRUE.get(os.environ.get("BROKEN_FLOCK", ""), set())
    for item in items if untrue else ():
        if any(not mark.args or untrue & {*mark.args} for mark in item.iter_markers("locks_work")):
            item.add_marker(pytest.mark.skip(reason="claims that locks work"))


@pytest.fixture(scope="session", autouse=True)
def _nothing_left_on_the_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Remove the sessions that caches on network filesystems keep in a directory of the node."""
    yield
    for where, _, names in os.walk(tmp_path_factory.getbasetemp()):
        # Only caches of this run, which are those with a readable manifest.
        if "manifest.json" in names and (manifest := read_manifest(Path(where))).get("id"):
            local = node_namespace(Config(where, locks="lease"), manifest).local
            for path in local.parent.glob(f"shardcache-*-{local.name.rpartition('-')[2]}"):
                shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def bucket(s3: S3Server, request: pytest.FixtureRequest) -> str:
    """A bucket for this test alone."""
    name = f"t{abs(hash(request.node.nodeid)) % 10**10}-{os.getpid()}"
    s3.create_bucket(name)
    return name


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[Proxy]:
    """A proxy that records the requests between the test and the server."""
    with Proxy(s3) as found:
        yield found


@pytest.fixture
def s3_environment(s3: S3Server, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Point S3 clients at the server, through the proxy."""
    environment = {**s3.environment(), "AWS_ENDPOINT_URL_S3": proxy.url}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return environment


@pytest.fixture
def put(s3: S3Server, bucket: str, s3_environment: dict[str, str]) -> Callable[[str, bytes], str]:
    """Returns a function that stores an object in the bucket; it returns the URL."""

    def put(name: str, data: bytes) -> str:
        s3.put(bucket, name, data)
        return f"s3://{bucket}/{name}"

    return put


@pytest.fixture(autouse=True)
def _own_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide the machine's configuration, put the cache into the test's directory, retry soon."""
    monkeypatch.setattr(retry, "BASE", 0.01)
    foreign = ("SHARDCACHE_", "AWS_", "WDS_", "SLURM_", "GROUP_", "REQUESTS_", "CURL_", "SSL_")
    for name in list(os.environ):
        if name.startswith(foreign):
            monkeypatch.delenv(name)
    for name in ("COLUMNS", "LINES"):  # pseudo-terminals have their own size
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SHARDCACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("SHARDCACHE_MIN_FREE", "0")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "no-config"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no-aws-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no-aws-credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return make_root(Config(tmp_path / "cache"))


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    """Eight shards on a slow mount, and a cache in front of it."""
    return Shop(tmp_path)


@pytest.fixture
def origin(request: pytest.FixtureRequest) -> MemoryOrigin:
    """An origin in memory, with faults on demand; a module may list its ``OBJECTS`` by URL."""
    return MemoryOrigin(objects=dict(getattr(request.module, "OBJECTS", {})))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """Replace the library's clock; only sleeping advances it."""
    return FakeClock(monkeypatch)


@pytest.fixture
def fail_files(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Returns a function that lets fsspec's reads of files fail after some bytes."""

    def start(after: int, error: BaseException | None = None, most: int = 1 << 30) -> None:
        left, real = [after], LocalFileOpener.read

        def read(file: LocalFileOpener, size: int) -> bytes:
            if left[0] < 0:
                raise error or OSError("the server went away")
            left[0] -= len(data := real(file, min(size, most)))
            return data

        monkeypatch.setattr(LocalFileOpener, "read", read)

    return start


@pytest.fixture
def set_variables(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Returns a function that sets variables of the environment, also to numbers."""

    def set_variables(**values: object) -> None:
        for name, value in values.items():
            monkeypatch.setenv(name, str(value))

    return set_variables


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread can start, as at a limit of processes."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)


@pytest.fixture
def make_cache(origin: MemoryOrigin) -> Iterator[Callable[..., Cache]]:
    """Make caches that read ``s3://`` from the in-memory origin, in this process only."""
    made: list[Cache] = []

    def make(**options: object) -> Cache:
        cache = Cache(**options)
        made.append(cache)
        cache.process.prepare()
        cache.process.origins.use("s3", origin)
        return cache

    yield make
    origin.release()
    for cache in made:
        cache.close()


@pytest.fixture
def make_job(
    make_cache: Callable[..., Cache], monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Cache]:
    """Make caches of jobs, each with a namespace of its own."""

    def make(name: str) -> Cache:
        monkeypatch.setenv("SHARDCACHE_JOB", name)
        return make_cache(isolation="job")

    return make


@pytest.fixture
def pool(make_cache: Callable[..., Cache], origin: MemoryOrigin) -> Iterator[ThreadPoolExecutor]:
    """Threads of the test; at its end, the origin lets their responses go on."""
    with ThreadPoolExecutor(64) as pool:
        yield pool
        origin.release()


@pytest.fixture
def nas(tmp_path: Path) -> Path:
    """A directory that all nodes share."""
    (tmp_path / "nas").mkdir()
    return tmp_path / "nas"


@pytest.fixture
def filled(
    make_cache: Callable[..., Cache], origin: MemoryOrigin, tmp_path: Path, nas: Path
) -> Callable[[str], Path]:
    """Returns a function that lets a node copy a shard to the NAS; it returns the path there."""

    def fill(url: str) -> Path:
        upstream = {"url": str(nas), "write_back": True}
        with make_cache(dir=tmp_path / "first", upstreams=[upstream]) as cache:
            cache.open(url).read()
        origin.requests.clear()
        origin.stats.clear()
        return nas / url.removeprefix("s3://")

    return fill


@pytest.fixture
def open_cache() -> Iterator[Callable[..., Cache]]:
    """Open caches, in one directory unless they name another."""
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(Cache(**options))


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    """Check that the test's threads end, except the one that writes statistics each second."""
    before = set(threading.enumerate())
    yield
    new = (t for t in threading.enumerate() if t not in before and t.name != "shardcache-stats")
    # A thread without an ident never ran, because a signal handler raised while it was started.
    left = [t for t in new if t.name.startswith("shardcache-") and t.ident is not None]
    for thread in left:
        thread.join(60)
    assert not [t for t in left if t.is_alive()]

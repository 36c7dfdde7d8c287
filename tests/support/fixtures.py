"""Fixtures for all tests: a real S3 server, a proxy before it, an origin in memory."""

import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from shardcache.cache import Cache
from shardcache.cli.demo import S3Server
from shardcache.layout import Layout, read_manifest
from shardcache.locks.mounts import node_namespace
from shardcache.store.root import make_root
from tests.support.fakes import FakeClock, MemoryOrigin
from tests.support.proxy import Proxy
from tests.support.webservers import Scripted, running


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """One SeaweedFS for the whole run."""
    with S3Server(directory=tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def serve() -> Iterator[Callable[..., Scripted]]:
    """Starts servers that give this answer, or what this function makes of a request's head."""
    with ExitStack() as stack:

        def start(answer: bytes | Callable[[str], bytes], most: int = 1) -> Scripted:
            said = answer if callable(answer) else lambda head: answer
            return stack.enter_context(running(Scripted(said, most)))

        yield start


#: Run when they are named, and then whole: the first needs packages of its own, the second time.
APART = {"packages", "stress"}


def pytest_configure(config: pytest.Config) -> None:
    """A run that a script started in the background ignores SIGINT, and so would its children."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`make test` leaves `APART` out."""
    named = {part for argument in config.args for part in Path(argument).parts}
    return True if collection_path.name in APART - named else None


#: Files that take long and so start first: the last ones leave no process idle.
LONG = {"test_run.py", "test_demo.py", "test_examples.py", "test_processes.py", "test_wds.py"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONG)


@pytest.fixture(scope="session", autouse=True)
def _nothing_left_on_the_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Caches on network filesystems keep their sessions in a directory of the node."""
    yield
    for where, _, names in os.walk(tmp_path_factory.getbasetemp()):
        # A test may have damaged it, and another run's directories are not ours to remove.
        if "manifest.json" in names and read_manifest(Path(where)).get("id"):
            local = node_namespace(Path(where), "lease", 0.0).local
            for path in local.parent.glob(f"shardcache-*-{local.name.rpartition('-')[2]}"):
                shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def bucket(s3: S3Server, request: pytest.FixtureRequest) -> str:
    """A bucket of this test alone."""
    name = f"t{abs(hash(request.node.nodeid)) % 10**10}-{os.getpid()}"
    s3.create_bucket(name)
    return name


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[Proxy]:
    """Counts what passes between the test and the server."""
    with Proxy(s3) as found:
        yield found


@pytest.fixture
def s3_environment(s3: S3Server, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment that leads clients to the server, through the proxy."""
    environment = {**s3.environment(), "AWS_ENDPOINT_URL_S3": proxy.endpoint_url}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return environment


@pytest.fixture(autouse=True)
def _own_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No configuration of the machine reaches a test."""
    for name in list(os.environ):
        if name.startswith(("SHARDCACHE_", "AWS_", "WDS_", "SLURM_")):
            monkeypatch.delenv(name)
    for name in ("COLUMNS", "LINES"):  # of whoever started the tests: pseudo-terminals differ
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "no-config"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no-aws-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no-aws-credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    """Of a cache that was just made."""
    return make_root(tmp_path / "cache", "test")


@pytest.fixture
def origin() -> MemoryOrigin:
    """Objects in memory, with faults on demand."""
    return MemoryOrigin()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """For all of the library, time passes only when somebody sleeps."""
    return FakeClock(monkeypatch)


@pytest.fixture
def make_cache(
    tmp_path: Path, origin: MemoryOrigin, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Cache]]:
    """Makes caches that read ``s3://`` from the in-memory origin, which is in this process only."""
    made: list[Cache] = []

    def make(**options: object) -> Cache:
        options.setdefault("dir", tmp_path / "cache")
        options.setdefault("min_free", 0)
        cache = Cache(**options)
        made.append(cache)
        process = cache._here()
        process.site()
        process.origins.add("s3", origin)
        return cache

    yield make
    for cache in made:
        cache.close()


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    """Every fetch ends its threads; those that another test left are not this one's fault.

    The one that writes what was counted ends within a second, which is long for many tests.
    """
    before = set(threading.enumerate())
    yield
    names = threading.enumerate()
    left = [t for t in names if t.name.startswith("shardcache-") and t not in before]
    left = [t for t in left if t.name != "shardcache-stats"]
    for thread in left:
        thread.join(60)
    assert not [t for t in left if t.is_alive()]

"""Nearer copies: what is taken from them, what is given to them, and that none can do harm."""

from __future__ import annotations

import hashlib
import logging
import pickle
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardcache.cache import Cache
from shardcache.cli.demo import S3Server
from shardcache.config import Config, StorageOptions, Upstream
from shardcache.errors import TransferError
from shardcache.origins.base import TransientError
from shardcache.origins.filesystem import FsspecBody
from tests.support.fakes import MemoryOrigin
from tests.support.proxy import Proxy
from tests.support.storetools import no_descriptor_left
from tests.support.tars import make_tar

URL = "s3://lab/train/0.tar"
DATA = make_tar(0, members=50, size=40_000)
SIDECAR = "0.tar.shardcache.json"

Make = Callable[..., Cache]


@pytest.fixture
def nas(tmp_path: Path) -> Path:
    """A directory that all nodes see."""
    (tmp_path / "nas").mkdir()
    return tmp_path / "nas"


@pytest.fixture
def node(make_cache: Make, origin: MemoryOrigin, tmp_path: Path) -> Make:
    """Another node of the cluster, each time."""
    origin.objects[URL] = DATA
    count = iter(range(100))

    def make(*upstreams: Any, **options: Any) -> Cache:
        return make_cache(
            dir=tmp_path / f"node-{next(count)}", upstreams=list(upstreams), **options
        )

    return make


def read(cache: Cache, url: str = URL) -> bytes:
    with cache.open(url) as stream:
        return stream.read()


def version(cache: Cache, url: str = URL) -> str:
    entry = cache.entry(url)
    assert entry is not None
    return entry.version


def requests(origin: MemoryOrigin) -> int:
    return len(origin.requests) + len(origin.stats)


def writes(place: Path | str) -> dict[str, Any]:
    return {"url": str(place), "write_back": True}


@pytest.mark.parametrize("fill", ["follow", "complete"])
def test_a_cluster_pays_its_origin_once(node: Make, origin: MemoryOrigin, nas: Path, fill) -> None:
    with no_descriptor_left(), node(writes(nas), fill=fill) as first:
        assert read(first) == DATA
    assert sorted(path.name for path in (nas / "lab/train").iterdir()) == ["0.tar", SIDECAR]
    assert (nas / "lab/train/0.tar").read_bytes() == DATA
    before = requests(origin)
    for _ in range(3):
        other = node(nas, fill=fill)
        assert read(other) == DATA and version(other) == version(first)
        entry = other.entry(URL)
        assert entry is not None and entry.metadata().info == first.entry(URL).metadata().info
    assert requests(origin) == before


def test_upstreams_are_asked_in_order_and_the_origin_last(node, origin, tmp_path):
    places = [tmp_path / name for name in ("empty", "second", "third")]
    for place, data in zip(places[1:], (DATA, make_tar(9, members=2)), strict=True):
        (place / "lab/train").mkdir(parents=True)
        (place / "lab/train/0.tar").write_bytes(data)  # copies that somebody else made
    cache = node(*places)
    assert read(cache) == DATA and requests(origin) == 0
    assert cache.entry(URL).metadata().info.etag is None
    assert read(node(places[0])) == DATA and requests(origin) > 0


def of_another_shard(data: Path, sidecar: Path) -> None:
    for path in (data, sidecar):
        path.write_bytes(path.with_name(path.name.replace("0.tar", "1.tar")).read_bytes())


#: What may have become of a copy and its sidecar.
SPOILT: dict[str, Callable[[Path, Path], object]] = {
    "flipped": lambda data, sidecar: data.write_bytes(DATA[:-1] + bytes([DATA[-1] ^ 1])),
    "cut": lambda data, sidecar: data.write_bytes(DATA[:-512]),
    "longer": lambda data, sidecar: data.write_bytes(DATA + bytes(512)),
    "no table": lambda data, sidecar: sidecar.write_bytes(b"null"),
    "too long": lambda data, sidecar: sidecar.write_bytes(b"x" * 100_000),
    "of another shard": of_another_shard,
}


@pytest.mark.parametrize("how", SPOILT)
def test_a_damaged_copy_is_not_used_and_the_reader_does_not_notice(node, origin, nas, how, caplog):
    other = URL.replace("0.tar", "1.tar")
    origin.objects[other] = make_tar(1, members=50, size=40_000)
    with node(writes(nas)) as first:
        assert len(read(first)) == len(read(first, other))
    SPOILT[how](nas / "lab/train/0.tar", nas / "lab/train" / SIDECAR)
    caplog.set_level(logging.INFO)
    other = node(nas, fill="complete")
    assert read(other) == DATA
    assert version(other) == version(first)
    assert "damaged" in caplog.text or "is not used" in caplog.text
    assert list((other.dir / "v1/partial").iterdir()) == []


@pytest.fixture
def breaks_off(node, origin, nas, monkeypatch) -> bytes:
    """A shard whose copy in the upstream cannot be read to its end."""
    big = origin.objects[URL] = make_tar(3, members=200, size=60_000)
    with node(writes(nas)) as first:
        read(first)
    real = FsspecBody.readinto
    passed: list[int] = []

    def failing(self: FsspecBody, buffer: memoryview) -> int:
        if sum(passed) > 4 << 20:
            raise TransientError("the server went away")
        passed.append(real(self, buffer))
        return passed[-1]

    monkeypatch.setattr(FsspecBody, "readinto", failing)
    origin.requests.clear()
    return big


def test_who_began_at_an_upstream_goes_on_at_the_origin(breaks_off, node, origin, nas):
    assert read(node(nas, attempts=1, connections=1)) == breaks_off
    starts = [start for _, start, _ in origin.requests]
    assert starts and min(starts) >= 1 << 20  # what came is not asked again


def test_who_streams_from_an_upstream_gets_no_other_version_of_the_rest(
    breaks_off, node, origin, nas
):
    origin.objects[URL] = make_tar(4, members=200, size=60_000)
    with node(nas, attempts=1, max_size="1MiB").open(URL) as stream:
        assert stream.read(1 << 20) == breaks_off[: 1 << 20]
        with pytest.raises(TransferError, match="replaced"):
            stream.read()


@pytest.mark.parametrize(
    "url",
    [
        *("s3://lab/../x.tar", "s3://lab/a//b.tar", "s3://lab/./b.tar"),
        *("s3://lab/b.tar?versionId=7", f"s3://lab/{'x' * 201}.tar"),
    ],
)
def test_names_that_could_lead_elsewhere_are_not_looked_for(node, origin, nas, url):
    origin.objects[url] = DATA
    with node(writes(nas)) as cache:
        assert read(cache, url) == DATA
    assert sorted(p.name for p in (*nas.iterdir(), *nas.parent.iterdir())) == ["nas", "node-0"]


def test_a_copy_that_is_interrupted_is_not_there(node, nas, monkeypatch):
    def failing(source: Path, target: Path) -> None:
        target.write_bytes(DATA[:1000])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, node(writes(nas)) as cache:
        patch.setattr("shardcache.origins.resolve.shutil.copyfile", failing)
        assert read(cache) == DATA
        cache.close()
    assert list((nas / "lab/train").iterdir()) == []


def store(endpoint: str, bucket: str, keys: tuple[str, str], *, write_back: bool) -> dict[str, Any]:
    options = dict(zip(("key", "secret"), keys, strict=True))
    place = {"url": f"s3://{bucket}/cache", "endpoint_url": endpoint, "storage_options": options}
    return {**place, "write_back": write_back}


@pytest.mark.usefixtures("s3_environment")
def test_a_second_object_store_saves_the_first_one(
    s3: S3Server, bucket: str, proxy: Proxy, tmp_path: Path
) -> None:
    """The same server, by another way."""
    urls = [f"s3://{bucket}/train/{number}.tar" for number in range(4)]
    for number in range(4):
        s3.put(bucket, f"train/{number}.tar", make_tar(number, members=40, size=50_000))
    s3.create_bucket("near")
    keys = s3.access_key, s3.secret_key
    with Proxy(s3) as to_near:
        found = []
        for name in ("a", "b"):
            upstream = store(to_near.endpoint_url, "near", keys, write_back=name == "a")
            with Cache(tmp_path / name, min_free=0, upstreams=[upstream]) as cache:
                cache.prewarm(urls)  # which waits for the copies
                digests = [hashlib.sha256(read(cache, url)).hexdigest() for url in urls]
                found.append((digests, {version(cache, url) for url in urls}))
            if name == "a":
                paid = sum(traffic.gets for traffic in proxy.summary().values())
                to_near.reset()
        assert found[0] == found[1]
        # Prewarming lists sizes at the origin; what it fetches are copies.
        assert sum(traffic.gets for traffic in proxy.summary().values()) == paid
        assert sum(traffic.object_fetches for traffic in to_near.summary().values()) > 0


def test_a_store_that_is_down_is_asked_twice_and_then_left_alone(node, origin, caplog):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
    urls = [f"s3://lab/{number}.tar" for number in range(6)]
    for number, url in enumerate(urls):
        origin.objects[url] = make_tar(number, members=2)
    with node(store(endpoint, "near", ("AK", "SK"), write_back=True)) as cache:
        for url in urls:
            assert read(cache, url) == origin.objects[url]
    assert caplog.text.count("left alone for a while") == 1


def test_secrets_of_an_upstream_are_neither_shown_nor_pickled(tmp_path: Path) -> None:
    options = StorageOptions({"key": "AK", "secret": "hush", "anon": False})
    config = Config(tmp_path, upstreams=[Upstream("s3://b/x", storage_options=options)])
    assert "hush" not in repr(config) and b"hush" not in pickle.dumps(config)
    [copy] = pickle.loads(pickle.dumps(config)).upstreams
    assert dict(copy.storage_options) == {"anon": False}

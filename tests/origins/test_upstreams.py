"""Upstreams: reading copies from them, writing copies to them, and damaged copies."""

import errno
import logging
import shutil
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from urllib.parse import quote, unquote

import pytest
from fsspec.implementations.local import LocalFileOpener

from shardcache.cache import Cache
from shardcache.errors import IntegrityError, TransferError
from shardcache.process import _end_all as end_all
from tests.support import caches
from tests.support.fakes import Fault
from tests.support.proxy import Proxy
from tests.support.storetools import BLOCK, no_descriptor_left, refusing, room, wait_until
from tests.support.tars import make_tar

URL = "s3://lab/train/0.tar"
DATA = make_tar(0, members=50, size=40_000)
ALIKE = make_tar(8, members=50, size=40_000)  # as large
LARGE = make_tar(3, members=200, size=60_000)
URLS = [f"s3://lab/{number}.tar" for number in range(6)]
OBJECTS = {URL: DATA, **{url: make_tar(number) for number, url in enumerate(URLS)}}
SIDECAR = "0.tar.shardcache.json"


@pytest.fixture
def node(make_cache, tmp_path):
    """Each call makes the cache of another node."""
    count = iter(range(100))
    return lambda *upstreams, **options: make_cache(
        **{"dir": tmp_path / f"node-{next(count)}", "upstreams": list(upstreams)} | options
    )


def requests(origin) -> int:
    return len(origin.requests) + len(origin.stats)


def writable(directory) -> dict[str, object]:
    return {"url": str(directory), "write_back": True}


@pytest.mark.parametrize("fill", ["follow", "complete"])
def test_a_cluster_downloads_a_shard_from_its_origin_once(node, origin, nas, fill):
    with no_descriptor_left(), node(writable(nas), fill=fill) as first:
        assert first.open(URL).read() == DATA
    assert sorted(path.name for path in (nas / "lab/train").iterdir()) == ["0.tar", SIDECAR]
    assert (nas / "lab/train/0.tar").read_bytes() == DATA
    before = requests(origin)
    for _ in range(2):
        other = node(nas, fill=fill)
        assert other.open(URL).read() == DATA
        assert other.entry(URL).version == first.entry(URL).version
        assert other.entry(URL).metadata().info == first.entry(URL).metadata().info
    assert requests(origin) == before


def test_a_store_that_is_missing_is_named_and_not_made(node, tmp_path, caplog):
    cache = node(writable(tmp_path / "unmounted"))
    for url in URLS:
        cache.fetch(url)
        texts = [text for text in caches.warnings(caplog) if f"no {tmp_path}/unmounted" in text]
        assert len(texts) == 1
    assert not (tmp_path / "unmounted").exists()


def test_upstreams_are_tried_in_order_and_the_origin_last(node, origin, tmp_path):
    directories = [tmp_path / name for name in ("empty", "second", "third")]
    for directory, data in zip(directories[1:], (DATA, make_tar(9, members=2)), strict=True):
        (directory / "lab/train").mkdir(parents=True)
        (directory / "lab/train/0.tar").write_bytes(data)  # without a sidecar
    cache = node(*directories)
    assert cache.open(URL).read() == DATA and requests(origin) == 0
    assert cache.entry(URL).metadata().info.etag is None
    assert node(directories[0]).open(URL).read() == DATA and requests(origin) > 0


@pytest.mark.parametrize("copied", ["the same", "without sidecar", "another"])
def test_a_shard_that_the_origin_began_is_continued_by_it_or_read_from_a_copy(
    node, origin, nas, filled, make_cache, copied, caplog
):
    """Another version costs nothing that the origin has sent; otherwise the origin fails."""
    first = node(attempts=1, connections=1)
    origin.faults += [Fault(after=BLOCK + 9), Fault(after=None)]
    with pytest.raises(TransferError):
        first.fetch(URL)
    if copied == "another":
        origin.objects[URL] = make_tar(9, members=50, size=40_000)
    copy, origin.objects[URL] = filled(URL), DATA
    if copied == "without sidecar":
        copy.with_name(SIDECAR).unlink()
    if copied != "another":
        origin.faults += [Fault(after=0)] * 9
    cache = make_cache(dir=first.dir, upstreams=[nas], attempts=1, fill="complete")
    assert cache.open(URL).read() == DATA and cache.stats().streamed == 0
    assert "damaged" not in caplog.text
    assert copied != "another" or origin.requests[0][1] == BLOCK


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def of_another_shard(data, sidecar):
    for path in (data, sidecar):
        path.write_bytes(path.with_name(path.name.replace("0.tar", "1.tar")).read_bytes())


def of_another_program(data, sidecar, content):
    data.write_bytes(content)
    sidecar.unlink()


#: Damage of a copy or of its sidecar.
DAMAGE = {
    "flipped": lambda data, sidecar: data.write_bytes(flipped(DATA, len(DATA) - 1)),
    "cut": lambda data, sidecar: data.write_bytes(DATA[:-512]),
    "longer": lambda data, sidecar: data.write_bytes(DATA + bytes(512)),
    "not an object": lambda data, sidecar: sidecar.write_bytes(b"null"),
    "too long": lambda data, sidecar: sidecar.write_bytes(b"x" * 100_000),
    "not a checksum": lambda data, sidecar: sidecar.write_text(
        sidecar.read_text().replace('"checksum": null', '"checksum": "x"')
    ),
    "of another shard": of_another_shard,
    "another program's, empty": partial(of_another_program, content=b""),
    "another program's page": partial(of_another_program, content=b"<html>504</html>" * 99),
    "another program's, no archive": partial(of_another_program, content=b"x" * len(DATA)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_copy_is_not_used(node, origin, nas, damage, caplog):
    second = URL.replace("0.tar", "1.tar")
    origin.objects[second] = make_tar(1, members=50, size=40_000)
    with node(writable(nas)) as first:
        assert len(first.open(URL).read()) == len(first.open(second).read())
    DAMAGE[damage](nas / "lab/train/0.tar", nas / "lab/train" / SIDECAR)
    caplog.set_level(logging.INFO)
    other = node(nas, fill="complete")
    assert other.open(URL).read() == DATA
    assert other.entry(URL).version == first.entry(URL).version
    assert "damaged" in caplog.text or "is not used" in caplog.text or "empty" in damage
    assert list((other.dir / "v1/partial").iterdir()) == []


def test_a_copy_that_is_cut_while_it_is_read_is_not_used(node, filled, monkeypatch, caplog):
    copy, real = filled(URL), LocalFileOpener.read

    def read(file, size):
        if copy.stat().st_size == len(DATA):
            DAMAGE["cut"](copy, None)
        return real(file, size)

    monkeypatch.setattr(LocalFileOpener, "read", read)
    assert node(copy.parents[2]).open(URL).read() == DATA
    assert copy.stat().st_size < len(DATA)
    assert caplog.text.count("the copy in") == 1


@pytest.mark.parametrize("sidecar", [True, False])
def test_the_origin_continues_for_an_upstream_that_fails(
    node, origin, nas, filled, fail_files, caplog, sidecar
):
    """Without a sidecar, it is another program's copy, whose bytes must be equal."""
    data = origin.objects[URL] = LARGE
    copy = filled(URL)
    if not sidecar:
        copy.with_name(SIDECAR).unlink()
    fail_files(4 << 20)
    rest = origin.hold(after=1)
    with node(nas, connections=1).open(URL) as stream:
        first = stream.read(BLOCK)
        rest.set()
        assert first + stream.read() == data
    if sidecar:
        starts = [start for _, start, _ in origin.requests]
        assert starts and min(starts) >= BLOCK  # no byte is requested again
        assert "attempt" not in caplog.text


@pytest.mark.parametrize("then", ["the origin continues", "the next run has no upstream"])
def test_the_origin_does_not_finish_a_damaged_copy(
    node, origin, nas, filled, fail_files, caplog, then
):
    data = origin.objects[URL] = LARGE
    filled(URL).write_bytes(flipped(data, BLOCK + 9))
    fail_files(4 << 20, KeyboardInterrupt() if "next" in then else None)
    cache = node(nas, connections=1, fill="complete")
    if "next" in then:
        with pytest.raises(KeyboardInterrupt):
            cache.fetch(URL)
        cache.close()
        cache = node(dir=cache.dir, fill="complete")
    assert cache.open(URL).read() == data
    assert "is damaged or was replaced" in caplog.text
    assert cache.open(URL).read() == data and cache.stats().hits == 1


@pytest.mark.parametrize("fails", [False, True])
def test_a_damaged_copy_that_is_streamed_is_an_error(node, nas, filled, fail_files, fails):
    filled(URL).write_bytes(flipped(DATA, 9 if fails else len(DATA) - 1))
    if fails:
        fail_files(2500, most=1000)
    with node(nas, max_size=1, prefetch=0).open(URL) as stream:
        assert len(stream.read(1000)) == 1000
        with pytest.raises(IntegrityError, match="copy in an upstream is damaged"):
            stream.read()
    assert node(max_size=1).open(URL).read() == DATA


@pytest.mark.parametrize(
    "url",
    [
        *("s3://lab/../x.tar", "s3://lab/a//b.tar", "s3://lab/./b.tar"),
        *("s3://lab/b.tar?versionId=7", f"s3://lab/{'x' * 201}.tar", "s3://lab/c{0..2}.tar"),
    ],
)
def test_keys_that_are_no_safe_paths_are_not_copied(node, origin, nas, url, caplog):
    origin.objects[url] = DATA
    with node(writable(nas)) as cache:
        assert cache.open(url).read() == DATA
    assert "not using the upstream" not in caplog.text
    assert sorted(p.name for p in (*nas.iterdir(), *nas.parent.iterdir())) == ["nas", "node-0"]


@pytest.mark.parametrize(
    "data", [DATA, ALIKE, make_tar(8, members=2)], ids=["equal", "as large", "other"]
)
@pytest.mark.parametrize("is_link", [False, True])
def test_files_of_users_in_an_upstream_stay(node, origin, nas, tmp_path, data, is_link):
    copy, file = nas / "lab/train/0.tar", tmp_path / "mine.tar"
    with node(writable(nas)) as cache:
        rest = origin.hold(after=1)  # so that nothing is copied before the user's file is there
        opened = cache.open(URL)
        copy.parent.mkdir(parents=True)
        file.write_bytes(data)
        (copy.symlink_to if is_link else copy.hardlink_to)(file)
        rest.set()
        assert opened.read() == DATA
    assert not (nas / "lab/train" / SIDECAR).exists()  # which would state the digest of DATA
    assert node(nas).open(URL).read() == data
    origin.objects[URL] = make_tar(9, members=51, size=40_000)
    with node(writable(nas)) as cache:
        cache.prewarm(URL)
        cache.prewarm(URL, refresh=True)
        assert cache.open(URL).read() == origin.objects[URL]
    assert copy.samefile(file) and copy.is_symlink() == is_link
    assert file.read_bytes() == data
    file.unlink()  # the link leads nowhere
    with node(writable(nas)) as cache:
        cache.fetch(URL)
    assert copy.is_symlink() == is_link


def test_a_copy_of_another_size_than_the_listed_object_is_not_used(node, nas, tmp_path):
    shard = tmp_path / "lab/0.tar"
    copy = nas / str(shard)[1:]
    for path, data in ((shard, DATA), (copy, make_tar(9, members=2))):
        path.parent.mkdir(parents=True)
        path.write_bytes(data)
    cache = node(nas, cache_local=True)
    cache.prewarm(f"{shard.parent}/*.tar")
    assert cache.open(str(shard)).read() == DATA and cache.stats().hits == 1


@pytest.mark.parametrize(
    "name", ["a.tar#old", "b%20c.tar", "d e.tar", "f*.tar", "g?.tar", "\udce9.tar"]
)
@pytest.mark.parametrize("on_web", [False, True])
def test_odd_names_are_those_of_the_same_shards(make_cache, files, nas, tmp_path, name, on_web):
    shard = tmp_path / name
    shard.write_bytes(DATA)
    quoted = quote(str(shard), errors="surrogateescape")
    others = {unquote(str(shard)), str(shard).partition("#")[0], str(shard).replace("*", "x")}
    for other in others - {str(shard)}:
        files.files[quote(other)] = make_tar(9)
        (nas / other[1:]).parent.mkdir(parents=True, exist_ok=True)
        (nas / other[1:]).write_bytes(make_tar(9))
    files.files[quoted] = DATA
    upstream = files.url if on_web else writable(nas)
    with make_cache(cache_local=True, upstreams=[upstream]) as cache:
        assert cache.open(str(shard)).read() == DATA


@pytest.mark.parametrize("hangs", [False, True])
def test_a_copy_that_is_not_written_is_not_visible_and_fails_no_prewarm(
    node, nas, tmp_path, monkeypatch, caplog, hangs
):
    caplog.set_level(logging.INFO)
    released = threading.Event()

    def interrupted(source, target):
        target.write_bytes(DATA[:1000])
        released.wait(60 * hangs)
        raise OSError(errno.ENOSPC, "No space left on device")

    real, renamed = Path.replace, []
    monkeypatch.setattr(Path, "replace", lambda new, old: renamed.append(old) or real(new, old))
    (tmp_path / "other").mkdir()
    with node(writable(tmp_path / "other")) as cache:
        cache.open(URL).read()
        end_all()  # as at the exit
        assert [path.name for path in renamed if "other" in path.parts] == [SIDECAR, "0.tar"]
    monkeypatch.setattr("shardcache.origins.resolve.shutil.copyfile", interrupted)
    with node(writable(nas), timeout=0.3 if hangs else 60) as cache:
        cache.prewarm([URL])
        assert cache.open(URL).read() == DATA and cache.stats().hits == 1
    released.set()
    wait_until(lambda: not list((nas / "lab/train").iterdir()))
    assert ("it was not written within" in caplog.text) == hangs


def test_a_replaced_copy_is_no_copy_until_the_new_one_is_there(
    node, origin, nas, filled, monkeypatch
):
    copy = filled(URL)
    origin.objects[URL] = ALIKE  # as large
    replace = refusing(errno.EIO, when=lambda new, old: old == copy, real=Path.replace)
    with monkeypatch.context() as patch, node(writable(nas)) as cache:
        patch.setattr(Path, "replace", replace)
        assert cache.open(URL).read() == DATA
        assert cache.prewarm([URL], refresh=True).refreshed == 1
    assert not copy.exists()
    with node(writable(nas)) as other:
        assert other.open(URL).read() == ALIKE
    assert copy.read_bytes() == ALIKE


def test_a_shard_is_not_evicted_while_it_is_copied(node, nas, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    released, begun, real = threading.Event(), [], shutil.copyfile

    def slow(*paths):
        begun.append(paths)
        released.wait(60)
        return real(*paths)

    monkeypatch.setattr("shardcache.origins.resolve.shutil.copyfile", slow)
    limit = 5 * room(nas, len(OBJECTS[URLS[0]]))
    with node(writable(nas), max_size=limit, policy="lru") as cache:
        for number, url in enumerate(URLS):
            assert caches.read(cache, url) == OBJECTS[url]
            wait_until(lambda: not caches.unfinished(cache))
            wait_until(lambda number=number: len(begun) == min(number + 1, 4))
        released.set()
    assert sorted(path.name for path in nas.glob("lab/*.tar")) == [
        f"{n}.tar" for n in (0, 1, 2, 3, 5)
    ]
    assert f"{URLS[4]}: not copied to an upstream" in caplog.text
    assert "the upstream" not in caplog.text


@pytest.mark.parametrize("is_joined", [False, True])
def test_only_the_caller_that_needs_a_copy_waits_for_it(node, origin, nas, monkeypatch, is_joined):
    released, begun, real = threading.Event(), threading.Event(), shutil.copyfile

    def slow(*paths):
        begun.set()
        released.wait(60)
        return real(*paths)

    monkeypatch.setattr("shardcache.origins.resolve.shutil.copyfile", slow)
    with node(writable(nas)) as cache, ThreadPoolExecutor() as pool:
        gate = origin.hold(after=1000)
        stream = cache.open(URL) if is_joined else None  # which begins the download
        fetch = pool.submit(cache.fetch, URL)
        wait_until(lambda: sum(d.readers for d in caches.unfinished(cache)) == 1 + is_joined)
        stream = stream or cache.open(URL)
        gate.set()
        assert stream.read() == DATA  # does not wait for the copy
        assert begun.wait(60) and not fetch.done()
        released.set()
        fetch.result()
        assert (nas / "lab/train/0.tar").read_bytes() == DATA


def store(endpoint: str, access_key: str, secret_key: str) -> dict[str, object]:
    options = {"key": access_key, "secret": secret_key}
    return {**writable("s3a://near/cache"), "endpoint_url": endpoint, "storage_options": options}


@pytest.mark.usefixtures("s3_environment")
def test_an_upstream_can_be_an_object_store(s3, bucket, proxy, tmp_path):
    """Origin and upstream are the same server behind two proxies."""
    urls = [f"s3://{bucket}/train/{number}.tar" for number in range(4)]
    for number in range(4):
        s3.put(bucket, f"train/{number}.tar", make_tar(number, members=40, size=50_000))
    s3.create_bucket("near")
    with Proxy(s3) as to_near:
        near, found, requests = store(to_near.url, s3.access_key, s3.secret_key), [], []
        for name in ("a", "b"):
            to_near.reset()
            with Cache(tmp_path / name, min_free=0, upstreams=[near]) as cache:
                cache.prewarm(urls)  # returns after the copies are written
                found.append([(cache.open(url).read(), cache.entry(url).version) for url in urls])
            # Both list sizes at the origin. The second one downloads only copies.
            requests.append(proxy.fetches().total())
        assert found[0] == found[1] and requests[0] == requests[1] > 0
        assert to_near.fetches()


@pytest.mark.parametrize("is_down", [True, False])
def test_an_upstream_that_fails_is_left_alone(node, nas, fail_files, caplog, is_down):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
    (nas / "lab").mkdir()
    for url in URLS:
        (nas / url.removeprefix("s3://")).write_bytes(OBJECTS[url])
    fail_files(0, OSError(errno.EIO, "it cannot be read"))  # but it can be described
    with node(store(endpoint, "AK", "SK") if is_down else str(nas)) as cache:
        for url in URLS:
            assert cache.open(url).read() == OBJECTS[url]
    assert caplog.text.count("not using the upstream") == 1

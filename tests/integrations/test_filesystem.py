"""``shardcache::s3://...`` in fsspec."""

import errno
import os
import pickle
import re
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor

import fsspec
import numpy as np
import pytest
from fsspec.callbacks import Callback
from fsspec.implementations.dirfs import DirFileSystem

from shardcache import AccessDeniedError, ConfigError, default_cache
from tests.support.proxy import Answer, Fault, Rule
from tests.support.storetools import BLOCK, PATIENCE, descriptors, refusing, together
from tests.support.tars import make_tar

SHARD = make_tar(6)
NAMES = ("a.tar", "b.tar", "part/c.tar")


@pytest.fixture
def url(s3, bucket, s3_environment, proxy):
    for name in NAMES:
        s3.put(bucket, name, SHARD)
    proxy.reset()
    for protocol in ("s3", "shardcache"):  # fsspec keeps instances for another test's server
        fsspec.get_filesystem_class(protocol).clear_instance_cache()
    return f"shardcache::s3://{bucket}/a.tar"


@pytest.fixture
def default(tmp_path):
    """The directory of the default cache."""
    default_cache.cache_clear()
    return tmp_path / "cache"


def named(bucket, *names):
    return [f"{bucket}/{name}" for name in names]


def test_a_refusal_is_the_same_for_a_caller_that_repeats_it_with_anon(url, default, proxy):
    proxy.script(Rule(Fault(answer=Answer(403, [], b"")), times=None))
    with pytest.raises(AccessDeniedError):  # as by pandas
        fsspec.open(url, anon=True).open()


def test_open_and_cat_read_through_the_default_cache(url, default, proxy, tmp_path):
    for _ in range(2):
        with fsspec.open(url) as stream:
            assert stream.read(10) == SHARD[:10]
            stream.seek(-5, 2)
            assert stream.read() == SHARD[-5:]
    fs, path = fsspec.core.url_to_fs(url)
    assert [fs.cat_file(path, 5, 15), fs.cat_file(path, -7)] == [SHARD[5:15], SHARD[-7:]]
    assert fs.cat_file(path) == SHARD
    for caching in "simplecache", "filecache", "blockcache":
        options = {caching: {"cache_storage": str(tmp_path / caching)}}
        for _ in range(2):
            with fsspec.open(f"{caching}::{url}", **options) as stream:
                assert stream.read(10) == SHARD[:10]
                assert stream.seek(600) == 600 and stream.read() == SHARD[600:]
            assert stream.closed
    assert proxy.fetches().total() == 1 and list(default.rglob("a.tar"))
    assert default_cache() is default_cache()


def test_info_is_the_same_before_and_after_a_download(url, default, proxy):
    """Hugging Face's datasets name their own cache after this information."""
    fs, path = fsspec.url_to_fs(url)
    before, key = fs.info(path), fs.ukey(path)
    fs.cat_file(path)
    proxy.reset()
    after = fs.info(path)
    assert fs.ukey(path) == key and proxy.requests() == []
    assert after == {key: before[key] for key in after}
    assert set(after) == {"name", "size", "type", "ETag", "LastModified", "VersionId"}
    assert after["ETag"].startswith('"') and after["size"] == len(SHARD)
    assert fs.info(url) == fs.info(f"s3://{path}") == after


@pytest.mark.parametrize("form", ["shardcache::s3://{}", "shardcache://s3://{}"])
def test_listed_names_open_again_through_the_cache(form, url, bucket, default, proxy):
    fs, path = fsspec.url_to_fs(form.format(bucket))
    for start in path, form.format(bucket), fs.unstrip_protocol(bucket):
        expected = named(bucket, *NAMES)
        for method, where in (fs.find, start), (fs.glob, f"{start}/**/*.tar"):
            fs.invalidate_cache()
            proxy.reset()
            assert method(where) == expected
            assert len(proxy.requests()) == 1  # a walk would send one for each directory
        assert fs.ls(start, detail=False) == named(bucket, "a.tar", "b.tar", "part")
        assert fs.glob(f"{start}/*.tar") + fs.glob(f"{start}/*/c*") == expected
        walked = [f"{root}/{name}" for root, _, names in fs.walk(start) for name in names]
        assert sorted(walked) == expected == list(fs.find(start, detail=True))
    assert path == bucket and [fs._strip_protocol(name) for name in expected] == expected
    for name in expected:
        with fsspec.open(fs.unstrip_protocol(name)) as stream:
            assert stream.read() == fs.open(name).read() == fs.cat(name) == SHARD
        assert default_cache().path(fs.unstrip_protocol(name)).read_bytes() == SHARD
    assert proxy.fetches().total() == 3


def test_a_name_with_its_target_takes_options_as_a_chain_does(url, tmp_path, s3, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    options = {
        "s3": {"key": s3.access_key, "secret": s3.secret_key},
        "shardcache": {"dir": str(tmp_path / "own")},
    }
    fs, path = fsspec.url_to_fs(url, **options)
    for name in url, fs.unstrip_protocol(path):
        with fsspec.open(name, **options) as stream:
            assert stream.read() == SHARD


def test_the_path_can_be_in_the_first_link_of_a_chain(url, bucket, default):
    """Hugging Face's datasets use this form, and add options."""
    form = f"shardcache://{bucket}/a.tar::s3://"
    fs, _, (found,) = fsspec.get_fs_token_paths(form, storage_options={"block_size": 0})
    assert fs.open(found, "rb", block_size=0).read() == SHARD
    assert list(default.rglob("a.tar"))  # in the default cache: the options are not the cache's
    fs, pattern = fsspec.url_to_fs(f"shardcache://{bucket}/*.tar::s3://")
    assert fs.glob(pattern) == named(bucket, "a.tar", "b.tar")
    name = fs.unstrip_protocol(fs.glob(pattern)[0])
    with fsspec.open(f"{name}::s3://") as stream:  # they may add the target again
        assert stream.read() == SHARD


def test_a_pickle_keeps_the_cache_and_a_fork_makes_its_own_target(url, bucket, tmp_path, proxy):
    """s3fs needs a thread, which a forked child does not have."""
    fs, path = fsspec.url_to_fs(url, shardcache={"dir": str(tmp_path / "own")})
    assert fs.cat_file(path) == SHARD and list((tmp_path / "own").rglob("a.tar"))
    fs.clear_instance_cache()
    again = pickle.loads(pickle.dumps(fs))
    assert again is not fs
    assert again.cat_ranges([path, path], [0, -3], [4, None]) == [SHARD[:4], SHARD[-3:]]
    parents = fs.fs
    assert len(fs.ls(bucket)) == 3

    def look(number):
        return [fs.fs is parents, fs.size(path), fs.cat_file(path, 0, 3), *fs.glob(f"{bucket}/b*")]

    assert together(1, look) == [[False, len(SHARD), SHARD[:3], f"{bucket}/b.tar"]]
    assert fs.fs is parents and proxy.fetches().total() == 1


def test_a_child_that_is_forked_while_a_thread_makes_a_cache_makes_its_own(default, monkeypatch):
    started, end, parent = threading.Event(), threading.Event(), os.getpid()

    def make():
        if os.getpid() == parent:
            started.set()
            end.wait(PATIENCE)
        return default_cache()

    def find():
        return fsspec.filesystem("shardcache", target_protocol="memory").cache.dir

    monkeypatch.setattr("shardcache.cache.default_cache", make)
    with ThreadPoolExecutor() as pool:
        pool.submit(find)
        assert started.wait(PATIENCE)
        try:
            assert together(1, lambda number: str(find())) == [str(default)]
        finally:
            end.set()


@pytest.fixture
def memory(tmp_path, monkeypatch):
    """A filesystem with `NAMES` below its root, read through a cache of its own."""
    target = fsspec.filesystem("memory")
    monkeypatch.setattr(type(target), "store", {})
    monkeypatch.setattr(type(target), "pseudo_dirs", [""])
    target.pipe({f"/{name}": SHARD for name in NAMES})
    options = {"dir": str(tmp_path / "own")}
    return fsspec.filesystem("shardcache", target_protocol="memory", **options)


@pytest.fixture
def web(tmp_path):
    """Web servers, read through a cache of their own."""
    return fsspec.filesystem("shardcache", target_protocol="http", dir=str(tmp_path / "own"))


def test_opens_in_many_threads_share_one_cache(memory):
    """fsspec makes a filesystem for each thread, and keeps it."""
    options = {"dir": memory.storage_options["dir"]}

    def read():
        with fsspec.open("shardcache::memory://a.tar", shardcache=options) as stream:
            assert stream.read(4) == SHARD[:4]

    read()
    before = len(descriptors())
    for _ in range(20):
        with ThreadPoolExecutor() as pool:
            pool.submit(read).result()
    assert len(descriptors()) <= before
    one, other = (fsspec.url_to_fs(f"shardcache::memory://{name}")[0] for name in NAMES[:2])
    assert one is other


@pytest.mark.parametrize("root", ["", "/", "memory://", "shardcache://memory://"])
def test_names_are_those_that_fsspecs_own_code_expects(root, memory, tmp_path):
    mapper, below = memory.get_mapper(root), DirFileSystem(f"{root}/part", memory)
    assert sorted(mapper) == list(NAMES) and mapper["part/c.tar"] == SHARD
    assert below.cat("c.tar") == SHARD and below.find("") == ["c.tar"]
    assert memory.cat(memory.glob(f"{root}/*.tar")[0]) == SHARD
    assert memory.glob(f"{root}/*/") == ["/part"]
    assert memory.info(f"{root}/a.tar")["name"] == memory._strip_protocol(f"{root}/a.tar")
    assert memory.du(root) == 3 * len(SHARD) and memory._parent(f"{root}/part/c.tar") == "/part"
    memory.get([f"{root}/a.tar"], f"{tmp_path}/copies/")
    memory.get(f"{root}/part", f"{tmp_path}/copies/", recursive=True)
    copies = [(tmp_path / "copies" / name).read_bytes() for name in ("a.tar", "part/c.tar")]
    assert copies == [SHARD] * 2


def test_a_file_describes_itself_before_and_after_its_first_download(memory, tmp_path):
    for _ in range(2):
        with memory.open("/a.tar") as stream:
            assert (stream.size, stream.mode, stream.tell()) == (len(SHARD), "rb", 0)
            stream.seek(3)
            assert np.fromfile(stream, np.uint8).tobytes() == SHARD[3:]
        assert memory.read_block("/a.tar", len(SHARD) - 3, 9) == SHARD[-3:]
        callback = Callback()
        memory.get_file("/a.tar", str(tmp_path / "copy"), callback=callback)
        assert callback.size == callback.value == len(SHARD)
        with pytest.raises(ValueError):
            stream.fileno()  # of a closed file
        memory.cat_file("/b.tar", 0, 1)  # the other loop reads this one from the cache


def test_numpy_waits_for_the_first_download(files, web):
    files.files["/a.tar"] = content = SHARD + bytes(3 * BLOCK)
    more = files.hold("/a.tar", len(SHARD))
    with ThreadPoolExecutor(1) as pool, web.open(f"{files.url}/a.tar") as stream:
        found = pool.submit(np.fromfile, stream, np.uint8)
        more.set()
        assert found.result().tobytes() == content


def test_a_response_without_a_length_is_read(serve, web):
    url = serve(b"HTTP/1.0 200 OK\r\n\r\n" + SHARD).url + "/a.tar"
    assert web.cat_file(url) == web.cat(url) == SHARD


def test_no_error_of_a_missing_file_shows_a_signature(serve, web, tmp_path):
    url = serve(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n").url
    for act in (
        web.cat,
        web.expand_path,
        lambda url: web.get(url, str(tmp_path)),
        lambda url: list(web.walk(url, on_error="raise")),
    ):
        with pytest.raises(FileNotFoundError) as caught:
            act(f"{url}/a.csv?X-Amz-Signature=SECRET")
        assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize("name", ["info", "ukey", "checksum", "created", "modified", "exists"])
def test_a_file_keeps_its_description_when_it_becomes_cached(name, memory):
    before = getattr(memory, name)("/a.tar")
    memory.cat("/a.tar")
    assert getattr(memory, name)("/a.tar") == before
    memory.fs.pipe("/a.tar", SHARD * 2)
    assert memory.size("/a.tar") == len(memory.cat("/a.tar")) == len(SHARD)


def test_a_version_id_is_honoured_or_refused(url, bucket, default, s3, memory):
    fs, path = fsspec.url_to_fs(url, s3={"version_aware": True})
    newer = make_tar(7)
    s3.client().put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    s3.put(bucket, "a.tar", SHARD)
    fs.invalidate_cache()
    old = fs.info(path)["VersionId"]
    s3.put(bucket, "a.tar", newer)
    fs.invalidate_cache()
    assert fs.cat_file(path) == newer
    assert fs.cat_file(path, version_id=old) == fs.open(path, version_id=old).read() == SHARD
    assert fs.info(path, version_id=old)["VersionId"] == old != fs.info(path)["VersionId"]
    with pytest.raises(ConfigError, match="no version_id"):
        memory.open("/a.tar", version_id=old)


@pytest.mark.parametrize(
    ("names", "arguments"),
    [
        ("mkdir makedir makedirs mkdirs rmdir rm rm_file delete touch", ("/a.tar",)),
        ("mv move rename cp copy cp_file", ("/a.tar", "/new.tar")),
        ("put put_file upload", (__file__, "/new.tar")),
        ("pipe pipe_file write_bytes write_text", ("/new.tar", "x")),
        ("open", ("/new.tar", "wb")),
    ],
)
def test_every_method_that_writes_is_refused(memory, names, arguments):
    for name in names.split():
        with pytest.raises(ConfigError, match="A cache is read-only: it refuses"):
            getattr(memory, name)(*arguments)
    assert memory.find("/") == [f"/{name}" for name in NAMES]


def test_wrong_options_and_chains_are_refused(memory, default):
    with pytest.raises(ConfigError, match="/a.tar cannot be opened with generation"):
        memory.cat_file("/a.tar", generation=1)
    assert memory.open("/a.tar", block_size=1, cache_type="none", cache_options={}).read(1)
    with pytest.raises(ConfigError, match=r"sig=\*\*\* .* mode 'wb'"):
        fsspec.open("shardcache::https://h/k?sig=secret").fs.open("https://h/k?sig=secret", "wb")
    with pytest.raises(ConfigError, match=r"option 'key' .* go into a table .* such as s3="):
        fsspec.filesystem("shardcache", target_protocol="memory", key="x").open("/a.tar")
    with pytest.raises(ConfigError, match="URL of the origin .* target_protocol="):
        fsspec.filesystem("shardcache", skip_instance_cache=True)
    with pytest.raises(ConfigError, match="only fs="):
        fsspec.filesystem("shardcache", target_protocol="s3", fs=memory.fs)
    with pytest.raises(ConfigError, match="arguments of DirFileSystem by name"):
        fsspec.filesystem("shardcache", fs=fsspec.get_filesystem_class("dir")("/x", memory.fs))
    assert memory.open("/a.tar").read(-10) == SHARD


def test_archives_with_members_of_one_name_are_told_apart(tmp_path, default):
    for name in "one", "two":
        with zipfile.ZipFile(tmp_path / f"{name}.zip", "w") as archive:
            archive.writestr("a.txt", name)
    options = {"dir": tmp_path / "cache", "allow_schemes": ["zip"], "min_free": 0}
    for name in "one", "two":
        url = f"shardcache::zip://a.txt::{tmp_path}/{name}.zip"
        with fsspec.open(url, shardcache=options) as file:
            assert file.read() == name.encode()


def test_a_url_can_be_signed(url, default, s3):
    fs, path = fsspec.url_to_fs(url)
    assert re.search(r"/a\.tar\?.*Signature=", fs.sign(path, expiration=60))


def test_the_target_can_be_an_instance(memory):
    target = fsspec.filesystem("memory", skip_instance_cache=True)
    made = fsspec.filesystem("shardcache", fs=target, dir=memory.storage_options["dir"])
    assert made.fs is target and made.cat("/a.tar") == SHARD
    assert pickle.loads(pickle.dumps(made)).cat("/a.tar") == SHARD


def test_a_disk_that_fails_hides_no_file(memory, monkeypatch):
    assert memory.cat_file("/a.tar") == SHARD
    options = {**memory.storage_options, "max_size": "1GB"}  # of another process
    other = fsspec.filesystem("shardcache", **options)
    monkeypatch.setattr(os, "listdir", refusing(errno.EIO, real=os.listdir))
    assert other.exists("/a.tar") and other.cat_file("/a.tar") == SHARD

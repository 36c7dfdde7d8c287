"""Finding the offsets of samples, storing them with the shards, and reading index files."""

import io
import json
import random
import re
import tarfile
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardcache import Cache, TarDataset
from shardcache.errors import ConfigError, IntegrityError, ShardCacheError
from shardcache.layout import INDEX
from shardcache.wds import tar_samples
from tests.support.tars import make_tar, tar_of
from tests.wds.test_tar_files import archive, damaged

URL = "s3://lab/a.tar"


def in_sequence(path) -> list[dict]:
    with open(path, "rb") as stream:
        source = {"url": str(path), "stream": stream, "local_path": str(path)}
        return list(tar_samples(iter([source])))


def at_random(path, cache) -> list[dict]:
    """Return the samples, read from the last to the first, without the fields of the data set."""
    data = TarDataset(str(path), cache=cache)
    samples = [data[n] for n in reversed(range(len(data)))][::-1]
    assert [each.pop("__index__") for each in samples] == list(range(len(data)))
    return [each for each in samples if each.pop("__epoch__") == 0]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A cache that reads local files in place, and a path for one."""
    directory = tmp_path_factory.mktemp("place")
    with Cache(directory / "cache", min_free=0) as cache:
        yield cache, directory / "a.tar"


@given(seed=st.integers(0, 2**32))
@settings(max_examples=300, deadline=None)
def test_samples_are_those_of_a_pipeline_or_an_error(place, seed):
    cache, path = place
    rng = random.Random(seed)
    data = archive(rng)
    path.write_bytes(damaged(rng, data) if rng.random() < 0.5 else data)
    try:
        expected = in_sequence(path)
    except Exception:
        with pytest.raises(ShardCacheError, match=r"a\.tar"):
            at_random(path, cache)
        return
    try:
        assert at_random(path, cache) == expected
    except ShardCacheError as exn:
        assert re.search("global header|compressed", str(exn))


#: A member whose header only tarfile reads, and one with a plain header.
ODD = tar_of([("\udcff.x", b"0")], tarfile.PAX_FORMAT, whole_records=False)[:-1024]
PLAIN = tar_of([("a.x", b"0")], tarfile.USTAR_FORMAT, whole_records=False)[:-1024]


@pytest.mark.parametrize("first", [b"", PLAIN, ODD])
@pytest.mark.parametrize("field", ["comment", "mtime", "path", "size", "GNU.sparse.name"])
def test_a_global_header_is_refused_only_if_it_changes_files(place, first, field):
    cache, path = place
    header = tarfile.TarInfo.create_pax_global_header({field: "0"})
    path.write_bytes(first + header + tar_of([("b.x", b"1"), ("c.x", b"2")], tarfile.USTAR_FORMAT))
    if field in ("comment", "mtime"):
        assert at_random(path, cache) == in_sequence(path) != []
        assert cache.stats().bytes_saved == 0  # the file is read in place
        return
    with pytest.raises(IntegrityError, match=r"a\.tar .* global header"):
        TarDataset(str(path), cache=cache)


@pytest.fixture
def cache(make_cache, origin):
    origin.objects[URL] = make_tar(1, members=100)
    return make_cache()


def index_of(cache):
    return cache.path(URL).with_name(INDEX)


def test_the_offsets_are_written_once_and_leave_with_the_shard(cache):
    published = cache.fetch(URL).data.stat().st_mtime_ns
    data = TarDataset(URL, cache=cache)
    written = index_of(cache).stat()
    assert len(data) == 100
    assert cache.entry(URL).data.stat().st_mtime_ns == published
    TarDataset(URL, cache=cache)
    again = index_of(cache).stat()
    assert (again.st_ino, again.st_ctime_ns) == (written.st_ino, written.st_ctime_ns)
    assert [found.state for found in cache.verify()] == ["ok"]
    directory = index_of(cache).parent
    assert cache.remove(URL) == (len(make_tar(1, members=100)), 0)
    assert not directory.exists()
    assert not [*(cache.dir / "v1" / "partial").iterdir()]


def other_index(cache, origin) -> bytes:
    """Return the offsets of a shard of the same size, whose samples begin one sample later."""
    files = [("first", b"x" * 2500), *((f"{n}.x", b"x" * 2500) for n in range(100))]
    origin.objects["s3://lab/b.tar"] = tar_of(files)
    TarDataset("s3://lab/b.tar", cache=cache)
    return cache.path("s3://lab/b.tar").with_name(INDEX).read_bytes()


def signed(cache, record: bytes) -> bytes:
    """Return the content of an index of the shard, with its checksum."""
    *_, key, name, _ = index_of(cache).parts
    return record + crc32(record, crc32(f"samples2 {key} {name}".encode())).to_bytes(4, "little")


@pytest.mark.parametrize(
    "change", ["empty", "cut", "damaged", "of another shard", "of two samples"]
)
def test_offsets_that_do_not_fit_are_made_anew(cache, origin, change):
    data = TarDataset(URL, cache=cache)
    other, sound = other_index(cache, origin), index_of(cache).read_bytes()
    assert len(other) == len(sound) and len(set(map(len, origin.objects.values()))) == 1
    assert other[3:-12] == sound[11:-4]  # behind "[]", the problems
    changed = {"empty": b"", "cut": sound[:-9], "damaged": other[:-4] + sound[-4:]}
    of_two = sound[:11] + sound[19:27] + sound[19:-4]  # the first range holds two samples
    changed |= {"of another shard": other, "of two samples": signed(cache, of_two)}
    index_of(cache).write_bytes(changed[change])
    data._open.clear()
    assert [sample["__key__"] for sample in data] == [f"0001-{n:05d}" for n in range(100)]
    assert index_of(cache).read_bytes() == sound


def write(cache, record) -> str:
    path = cache.dir.parent / "sizes.json"
    path.write_text(json.dumps(record))
    return str(path)


def test_an_index_file_spares_the_shards(make_cache, origin, tmp_path):
    cache = make_cache()
    for record in (
        {"shardlist": [{"url": URL, "nsamples": 3}, {"url": "s3://lab/b.tar", "nsamples": 0}]},
        {URL: 3, "s3://lab/b.tar": 0},
    ):
        data = TarDataset(write(cache, record), cache=cache)
        assert (len(data), list(data.counts)) == (3, [3, 0])
        assert list(map(str, data.shards)) == [URL, "s3://lab/b.tar"]
    data = TarDataset(write(cache, {"x/a.tar": 3}), cache=cache)
    assert str(data.shards[0]) == f"file://{tmp_path}/x/a.tar"
    origin.objects["s3://lab/sizes.json"] = b'{"a.tar": 3}'
    data = TarDataset("s3://lab/sizes.json", cache=cache)
    assert (str(data.shards[0]), list(cache.entries())) == (URL, [])
    assert not origin.fetches or origin.requests == [("s3://lab/sizes.json", 0, None)]


OTHERS = [[], {}, *({"a.tar": count} for count in ("3", -1, 10**30, True)), {"shardlist": [1]}]
OTHERS += [{"shardlist": [{"url": url, "nsamples": 3}]} for url in (None, ["a.tar"])]


@pytest.mark.parametrize("record", OTHERS)
def test_another_json_file_is_refused(make_cache, record):
    cache = make_cache()
    text = r"sizes\.json is not an index of shards.*shardcache index"
    with pytest.raises(ConfigError, match=text):
        TarDataset(write(cache, record), cache=cache)


@pytest.mark.parametrize("name", ["a.tar.gz", "a.tgz", "a.tar"])
def test_a_compressed_archive_is_refused(make_cache, origin, name):
    packed, cache = io.BytesIO(), make_cache()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        tar.addfile(tarfile.TarInfo("a.txt"))
    url = f"s3://lab/{name}"
    origin.objects[url] = packed.getvalue()
    with pytest.raises(ConfigError, match=f"lab/{name} is compressed"):
        TarDataset(url, cache=cache)
    assert origin.fetches == (name == "a.tar")  # others are refused by their names
    file = write(cache, {url: 3})
    with pytest.raises(ConfigError, match=f"lab/{name} is compressed"):
        data = TarDataset(file, cache=cache)
        assert name == "a.tar" and data[0]


def test_several_nodes_need_an_index_file(make_cache, set_variables):
    set_variables(RANK=0, WORLD_SIZE=16, LOCAL_WORLD_SIZE=8)
    cache = make_cache()
    with pytest.raises(ConfigError, match="shardcache index 's3://lab/{0..9}.tar' -o train.json"):
        TarDataset("s3://lab/{0..9}.tar", cache=cache)
    assert len(TarDataset(write(cache, {URL: 3}), cache=cache)) == 3

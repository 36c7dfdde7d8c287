"""`TarDataset` returns the samples of a pipeline by their numbers, also after faults."""

import contextlib
import copy
import errno
import json
import os
import pickle
import resource
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import webdataset as wds

from shardcache import Cache, ShardBatchSampler, TarDataset
from shardcache.dataset import dataset as module
from shardcache.dataset.sampler import SampleIndex
from shardcache.errors import ConfigError, IntegrityError, ShardNotFoundError, TransferError
from shardcache.layout import INDEX
from shardcache.reading.stream import ShardStream
from tests.support.caches import warnings
from tests.support.storetools import no_descriptor_left, refusing, together, wait_until
from tests.support.tars import sample_tar, tar_of
from tests.support.trainingtools import DataSet, keys

SPEC = "s3://lab/{0..3}.tar"
SAMPLES = 6
URL = "s3://lab/1.tar"


@pytest.fixture(autouse=True)
def _objects(origin):
    origin.objects |= {f"s3://lab/{n}.tar": sample_tar(n, SAMPLES) for n in range(4)}


@pytest.fixture
def data(make_cache):
    return TarDataset(SPEC, cache=make_cache())


KEYS = [f"{shard:04d}-{n:05d}" for shard in range(4) for n in range(SAMPLES)]


def test_samples_equal_those_of_a_pipeline(data):
    assert repr(data) == f"<TarDataset: {len(data)} samples in {len(data.shards)} shards>"
    expected = list(data.cache.attach(wds.WebDataset(SPEC, shardshuffle=False)))
    for number, sample in enumerate(expected):
        assert data[number] == {**sample, "__index__": number, "__epoch__": 0}
    ninth = data[SampleIndex(9, epoch=7)]
    assert ninth == {**expected[9], "__index__": 9, "__epoch__": 7}
    assert type(ninth["__index__"]) is int
    assert data[-1] == data[np.int64(23)] == data.__getitems__([3, 23])[1]
    assert (len(data), data.counts.tolist()) == (24, [SAMPLES] * 4)
    assert [data.locate(n) for n in (0, 11)] == [("s3://lab/0.tar", 0), (URL, 5)]
    assert keys(data) == KEYS  # ends with an IndexError
    for wrong in (24, -25):
        with pytest.raises(IndexError, match="has 24 samples"):
            data[wrong]


def test_several_indices_give_a_list(data):
    for several in list, tuple, np.array, torch.tensor:
        assert keys(data[several([7])]) == KEYS[7:8]
        with pytest.raises(TypeError, match="mask.*flatnonzero"):
            data[several([True, False])]
    assert data[np.array(7)] == data[torch.tensor(7)] == data[7]
    assert data[[]] == data[24:] == []
    assert keys(data[-17:8]) == KEYS[7:8]
    assert keys(data[::-7]) == KEYS[::-7]
    for wrong in ([24], "7", 1.0, True):
        with pytest.raises((IndexError, TypeError)):
            data[wrong]


def pickled(value):
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickled])
def test_a_copy_in_the_middle_of_an_epoch_continues_on_its_own(data, copied):
    sampler = ShardBatchSampler(data, 4, shuffle=2)
    epochs = [list(sampler), list(sampler)]
    assert epochs[0] != epochs[1]
    sampler.load_state_dict({**sampler.state_dict(), "epoch": 0})
    batches = iter(sampler)
    assert [next(batches), next(batches)] == epochs[0][:2]
    assert data[3]  # a shard is open
    other, rest = copied(sampler), copied(batches)
    assert other.state_dict() == sampler.state_dict()
    other.set_epoch(1)
    for batch, kept in zip(other, epochs[1], strict=True):
        assert batch == kept and keys(other.data[batch]) == keys(data[kept])
    assert (other.epoch, sampler.epoch, len(other.data)) == (2, 0, 24)
    assert list(rest) == list(batches) == epochs[0][2:]
    assert sampler.epoch == 1


def test_stages_run_on_a_batch(make_cache):
    def data(*stages):
        return TarDataset(SPEC, cache=cache, stages=stages)

    cache = make_cache()
    odd = data(wds.select(lambda sample: sample["__index__"] % 2))
    assert keys(odd.__getitems__(range(6))) == KEYS[1:6:2]
    with pytest.raises(ConfigError, match=r"none of 2 samples of s3://lab/0\.tar, s3://lab/3\."):
        odd.__getitems__([0, 20])
    with pytest.raises(ConfigError, match=r"left none of 1 samples of s3://lab/1\.tar"):
        odd[8]
    assert odd.__getitems__([]) == []
    divided = data(wds.map(lambda sample: 1 / (sample["__index__"] - 9)))
    with pytest.raises(ZeroDivisionError) as caught:
        divided.__getitems__([4, 9, 5])
    assert caught.value.__notes__ == [f"in the stages, at {KEYS[9]} of {URL}"]
    with pytest.raises(TypeError) as caught:
        data(lambda sample: {**sample})[0]
    assert "write wds.map(f)" in caught.value.__notes__[1]
    with pytest.raises(ConfigError, match="at least one shard"):
        TarDataset([], cache=cache)
    with pytest.raises(ConfigError, match=r"batched cannot be a stage.*DataLoader"):
        data(wds.batched(3))
    with pytest.raises(ConfigError, match=r"shuffle cannot be a stage.*sampler"):
        data(wds.shuffle(3))


def test_a_shard_without_room_is_read_all_the_same(make_cache, origin, caplog):
    cache = make_cache(max_size=20_000)
    data = TarDataset(SPEC, cache=cache)
    requests = len(origin.requests)
    assert keys(reversed(data)) == KEYS[::-1]
    assert list(cache.entries()) == []
    assert len(origin.requests) <= requests + 24 + 8  # one per sample, and one to open each shard
    first, *others = warnings(caplog)
    assert "counting the samples of 4 shards" in first and SPEC in first
    assert ["streamed" in text for text in others] == [True]
    origin.etags = False  # each response may have another version
    assert keys(reversed(TarDataset(SPEC, cache=cache))) == KEYS[::-1]


def test_a_forked_child_reads_a_shard_that_its_parent_streams(serve, open_cache):
    shard = sample_tar(1, 400)  # more than a stream's buffer
    response = b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(shard), shard)
    data = TarDataset(f"{serve(response).url}/1.tar", cache=open_cache(max_size=20_000))
    assert keys([data[300]]) == ["0001-00300"]
    assert together(1, lambda _: keys([data[8]])) == [["0001-00008"]]


def test_the_advice_to_write_an_index_shows_no_secret(make_cache, monkeypatch):
    for name, value in {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1, "RANK": 0, "LOCAL_RANK": 0}.items():
        monkeypatch.setenv(name, str(value))
    command, cache = "pipe:curl -u me:secret http://h/a.tar", make_cache(allow_schemes=["pipe"])
    with pytest.raises(ConfigError, match="Run `shardcache index 'pipe:curl http") as caught:
        TarDataset(command, cache=cache)
    assert "secret" not in str(caught.value)


def break_file(path, monkeypatch):
    """Make reads of a file fail."""
    status = path.stat()
    reads = {"when": lambda fd, *_: os.path.samestat(os.fstat(fd), status)}
    for name in ("pread", "preadv"):
        monkeypatch.setattr(os, name, refusing(errno.EIO, real=getattr(os, name), **reads))


@pytest.mark.parametrize("is_indexed", [True, False])
@pytest.mark.parametrize("is_cut", [True, False])
def test_a_failing_disk_costs_no_sample(data, monkeypatch, is_indexed, is_cut):
    def cutting(fd):  # while the shard is opened
        if os.path.samestat(os.fstat(fd), status):
            os.truncate(broken, 5000)
        return dup(fd)

    broken, dup = data.cache.path(URL), os.dup
    if not is_indexed:
        broken.with_name(INDEX).unlink()
    status = broken.stat()
    if is_cut:
        monkeypatch.setattr(os, "dup", cutting)
    else:
        break_file(broken, monkeypatch)
    assert keys(data) == KEYS
    assert not os.path.samestat(data.cache.path(URL).stat(), status)  # downloaded again
    assert keys(data) == KEYS


@pytest.mark.filterwarnings("ignore:unclosed file")
def test_a_signal_handler_in_a_finalizer_keeps_no_shard_in_use(data, monkeypatch):
    def interrupted(stream):
        monkeypatch.setattr(ShardStream, "close", close)
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "unraisablehook", lambda *_: None)  # pytest's would keep the shard
    data[8]
    close = ShardStream.close
    monkeypatch.setattr(ShardStream, "close", interrupted)
    data._open.clear()
    assert ShardStream.close is close
    assert data.cache.clean(everything=True).kept == 0


def test_a_failing_disk_gives_no_thread_another_file(data, monkeypatch):
    other, pread = data.cache.path("s3://lab/2.tar"), os.pread

    def late(fd, size, offset):  # as if other threads ran just before the system call
        monkeypatch.setattr(os, "pread", pread)
        break_file(data.cache.path(URL), monkeypatch)
        assert keys([data[6]]) == KEYS[6:7]
        for _ in range(9):  # one of them gets the number that was closed
            stack.callback(os.close, os.open(other, os.O_RDONLY))
        return pread(fd, size, offset)

    data[6]
    monkeypatch.setattr(os, "pread", late)
    with contextlib.ExitStack() as stack:
        assert keys([data[7]]) == KEYS[7:8]


def test_the_first_sample_of_a_process_evicts_what_jobs_have_used(open_cache, tmp_path):
    options = {"dir": tmp_path / "full", "max_size": 60_000, "cache_local": True}
    paths = [tmp_path / f"{number}.tar" for number in range(2)]
    for number, path in enumerate(paths):
        path.write_bytes(sample_tar(number, SAMPLES))
    (tmp_path / "sizes.json").write_text(json.dumps(dict.fromkeys(map(str, paths), SAMPLES)))
    for path in paths:
        open_cache(**options).open(str(path)).read()
    other = open_cache(**options)  # it has no room for both, and has made no directory yet
    assert TarDataset(tmp_path / "sizes.json", cache=other)[SAMPLES]["__key__"] == "0001-00000"
    assert str(paths[1]) in other


def test_a_shard_that_is_replaced_while_it_is_streamed_is_opened_again(make_cache, origin):
    origin.objects[URL] = sample_tar(1, 400)  # more than a stream's buffer
    data = TarDataset(URL, cache=make_cache(max_size=20_000))
    assert keys([data[8]]) == ["0001-00008"]
    for number in (400, 401):
        origin.objects[URL] = sample_tar(9, number)
        with pytest.raises(TransferError, match=r"1\.tar was replaced") as caught:
            data[300]
        assert caught.value.__notes__ == [f"while reading sample 300 of {URL}"]
        if number == 400:
            assert keys(data.__getitems__([200, 8])) == ["0009-00200", "0009-00008"]
    with pytest.raises(IntegrityError, match=r"1\.tar has 401 samples, but .* states 400"):
        data[200]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (None, ShardNotFoundError),
        (lambda data: data[:9000], IntegrityError),
        (lambda data: b"<html>" + data, IntegrityError),
        (lambda data: sample_tar(1, 2), IntegrityError),
    ],
    ids=["absent", "cut", "no archive", "fewer samples"],
)
def test_an_error_names_shard_and_sample_and_the_handler_decides(
    make_cache, origin, tmp_path, change, error
):
    (tmp_path / "sizes.json").write_text(f'{{"{URL}": 6, "s3://lab/2.tar": 6}}')
    data = TarDataset(tmp_path / "sizes.json", cache=make_cache())
    sound = origin.objects.pop(URL)
    if change:
        origin.objects[URL] = change(sound)
    with pytest.raises(error, match=r"lab/1\.tar") as caught:
        data[4]
    assert caught.value.__notes__ == ["while reading sample 4 of s3://lab/1.tar"]
    seen = []
    data.handler = lambda exn: not seen.append(exn)
    assert keys(data.__getitems__([4, 5, 7])) == ["0002-00001"]
    assert [type(exn) for exn in seen] == [error] * 2
    with pytest.raises(error):  # nothing is left of the batch
        data[3]


def test_a_shard_that_is_refused_is_not_requested_for_each_sample(data, origin, clock):
    data.handler = wds.ignore_and_continue
    data.cache.clean(everything=True)
    content = origin.objects.pop(URL)
    origin.requests.clear()
    for _ in range(2):
        samples, error = data.read(range(2 * SAMPLES))
        assert (len(samples), type(error), URL in str(error)) == (SAMPLES, ShardNotFoundError, True)
    assert [url for url, *_ in origin.requests].count(URL) == 1
    origin.objects[URL] = content
    clock.sleep(61)
    assert len(data.read(range(2 * SAMPLES))[0]) == 2 * SAMPLES


def test_a_shard_that_cannot_be_counted_is_left_out_if_the_handler_says_so(make_cache, origin):
    del origin.objects[URL]
    origin.objects |= {"s3://lab/0.tar": tar_of([]), "s3://lab/3.tar": sample_tar(3, 1)}
    with pytest.raises(ShardNotFoundError, match=r"1\.tar"):
        TarDataset(SPEC, cache=make_cache())
    data = TarDataset(SPEC, cache=make_cache(), handler=wds.ignore_and_continue)
    assert data.counts.tolist() == [0, 0, 6, 1]
    assert keys(data) == [*KEYS[12:18], "0003-00000"]


def test_a_data_set_that_fails_cancels_no_download_of_another_thread(make_cache, origin):
    cache, whole = make_cache(), sample_tar(9, 200)
    origin.objects[URL] = whole
    more = origin.hold(4096)
    with ThreadPoolExecutor() as pool, cache.open(URL) as stream:
        rest = pool.submit(stream.read)
        with pytest.raises(ShardNotFoundError):
            TarDataset(["s3://lab/none.tar", URL], cache=cache)
        more.set()
        assert rest.result() == whole


def test_a_file_that_occurs_twice_is_an_error_of_its_sample(make_cache, origin):
    files = [(name, name.encode()) for name in ("a.txt", "b.txt", "b.txt", "c.txt")]
    origin.objects[URL] = tar_of(files)
    data = TarDataset([URL], cache=make_cache())
    assert (len(data), data[2]["txt"]) == (3, b"c.txt")
    for handler in data.handler, wds.ignore_and_stop, print:
        data.handler = handler
        with pytest.raises(IntegrityError, match=r"1\.tar: sample 1 .*duplicate file name"):
            data[1]
    data.handler = wds.ignore_and_continue
    assert data[1]["txt"] == b"b.txt"  # as in a pipeline


def test_few_shards_are_open_and_idle_ones_may_be_evicted(data, clock, monkeypatch):
    monkeypatch.setattr(module, "_MOST", 2)
    with no_descriptor_left():
        assert keys(data) == KEYS
        assert list(data._open) == [2, 3]
        data[0], data[20]
        assert list(data._open) == [0, 3]
        assert data.cache.remove(SPEC)[1] == 2  # in use
        clock.elapsed += module._IDLE + 0.1
        data[12]
        assert list(data._open) == [2]
        assert data.cache.remove(SPEC)[1] == 1
        data._open.clear()


def test_data_sets_share_the_descriptors_of_a_process(data, monkeypatch):
    other = TarDataset(SPEC, cache=data.cache)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (12, 12))
    assert keys(data) + keys(other) == 2 * KEYS
    assert (len(data._open) + len(other._open), 3 in other._open) == (3, True)


def test_threads_share_a_data_set(data, monkeypatch):
    monkeypatch.setattr(module, "_MOST", 1)

    def wrong(seed):
        order = np.random.default_rng(seed).permutation(np.tile(np.arange(24), 20))
        return [n for n in order if data[n]["__key__"] != KEYS[n]]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(wrong, range(4))) == [[]] * 4


def test_a_fork_waits_for_a_thread_that_reads_a_streamed_shard(
    s3, bucket, proxy, s3_environment, tmp_path
):
    shards = DataSet(s3, bucket, proxy, shards=1, members=400)
    with Cache(tmp_path / "cache", max_size=20_000) as cache:
        data = TarDataset(shards.spec, cache=cache)
        assert data[0]
        proxy.pause()
        with ThreadPoolExecutor(2) as pool:
            found = pool.submit(lambda: data[300]["__key__"])
            wait_until(lambda: data._open[0]._lock.locked())
            pool.submit(lambda: (time.sleep(0.3), proxy.resume()))
            assert together(1, lambda n: data[350]["__key__"]) == shards.keys[350:351]
            assert found.result() == shards.keys[300]


def test_an_index_file_may_have_a_signed_url_and_a_shard_a_path(files, make_cache, tmp_path):
    (shard := tmp_path / "1.tar").write_bytes(sample_tar(1, 3))
    assert len(TarDataset(shard, cache=make_cache(cache_local=True))) == 3
    files.files |= {"/d/1.tar": sample_tar(1, 3), "/d/index.json": b'{"1.tar": 3}'}
    url = f"{files.url}/d/index.json?X-Amz-Signature=a/b"
    assert keys(TarDataset(url, cache=make_cache())) == [f"0001-{n:05d}" for n in range(3)]

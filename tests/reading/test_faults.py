"""Faults of the disk while an entry is read: right bytes, or an error that persists.

tests/stress/test_netfs.py has a filesystem that really fails.
"""

import errno
import io
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardcache import TransferError
from tests.support.caches import read, warnings
from tests.support.storetools import BLOCK, no_descriptor_left, payload, refusing
from tests.support.tars import make_tar

URL, SMALL_URL = "s3://lab/train-0000.tar", "s3://lab/small.bin"
PART = BLOCK // 2
DATA, NEWER = (make_tar(seed, members=3, size=PART) for seed in (1, 2))
SMALL = payload(2000)
OBJECTS = {URL: DATA, SMALL_URL: SMALL}


@pytest.fixture
def warm(make_cache, origin):
    """A cache that contains the shards."""
    cache = make_cache()
    for url in (URL, SMALL_URL):
        cache.fetch(url)
    origin.requests.clear()
    return cache


@pytest.fixture
def break_reads(monkeypatch):
    """Returns a function that lets reads of entries fail from a position on."""

    def start(number, at=0, times=100):
        left = [True] * times

        def fails(fd, what, position):
            end = position + (what if isinstance(what, int) else len(what[0]))
            is_entry = "/objects/" in os.readlink(f"/proc/self/fd/{fd}")
            return left and is_entry and end > at and left.pop()

        for name in ("pread", "preadv"):
            monkeypatch.setattr(os, name, refusing(number, when=fails, real=getattr(os, name)))

    return start


def test_after_a_read_error_the_rest_is_streamed(warm, break_reads, origin, caplog):
    with no_descriptor_left(), warm.open(URL) as stream:
        first = stream.raw.read(PART)
        break_reads(errno.EIO)
        assert first + stream.read() == DATA
    assert origin.requests == [(URL, PART, None)]
    assert warm.path(URL) is None  # set aside
    assert warm.stats().errors_disk == 1
    assert len(warnings(caplog)) == 1 and "the rest is streamed" in caplog.text


def test_an_unreadable_file_is_not_linked_again(make_job, origin, break_reads):
    assert read(make_job("one"), URL) == DATA
    break_reads(errno.EIO, times=1)
    for _ in range(3):
        assert read(make_job("two"), URL) == DATA
    assert origin.fetches == 3  # the first download, the rest of the broken read, and a download


@pytest.mark.parametrize("sidecar", [True, False])
@pytest.mark.parametrize("at", [0, PART])
def test_two_versions_are_never_spliced(warm, break_reads, origin, at, sidecar):
    """A reader gets the new version only if it has received no bytes of the old one."""
    version = warm.entry(URL).version
    origin.objects[URL] = NEWER
    with warm.open(URL) as stream:
        first = stream.raw.read(at)
        break_reads(errno.EIO)
        if not sidecar:
            os.unlink(warm.entry(URL).path / "meta.json")
        if not at:
            assert stream.read() == NEWER
            return
        for _ in range(2):
            with pytest.raises(TransferError, match=rf"{URL} was replaced.*{version}"):
                stream.read()
        assert first == DATA[:at] and len(origin.requests) == 1


def test_a_stale_handle_is_reopened_once(warm, break_reads, origin, caplog):
    break_reads(errno.ESTALE, PART, times=1)
    with no_descriptor_left(), warm.open(URL) as stream:
        assert stream.raw.read(PART) + stream.read() == DATA
    assert origin.requests == [] and warnings(caplog) == []
    with warm.open(URL) as stream:
        break_reads(errno.ESTALE)
        assert stream.read() == DATA
    assert len(origin.requests) == len(warnings(caplog)) == 1


def test_a_stream_goes_on_if_its_cache_must_not_be_used_any_more(warm, break_reads):
    with warm.open(URL) as stream:
        first = stream.raw.read(PART)
        warm.close()
        warm.dir.chmod(0o777)
        break_reads(errno.EIO)
        assert first + stream.read() == DATA
    warm.dir.chmod(0o700)


def test_with_strict_a_read_error_is_raised_and_persists(warm, make_cache, break_reads, origin):
    break_reads(errno.EIO, PART, times=5)
    with make_cache(strict=True).open(URL) as stream:
        assert stream.read(10) == DATA[:10]
        for _ in range(2):
            with pytest.raises(OSError, match="EIO"):
                stream.read()
    assert origin.requests == []


def test_a_successful_read_resets_the_count_of_faults(warm, break_reads):
    reading = warm.process.disk.reading
    with warm.open(URL) as stream, warm.open(SMALL_URL) as small:
        break_reads(errno.EIO, times=2)
        assert stream.read() == DATA
        assert reading.faults == 1
        assert small.read() == SMALL
    assert read(warm, URL) == read(warm, URL) == DATA  # a download, then a hit
    assert reading.faults == 0


WHENCE = {"start": os.SEEK_SET, "end": os.SEEK_END}
SPANS = {
    "read": (-1, 2500),
    "readinto": (0, 2500),
    "start": (0, 2500),
    "end": (-2000, 0),
    "cut": (0, 2000),
}
steps = st.lists(
    st.one_of(*(st.tuples(st.just(s), st.integers(*span)) for s, span in SPANS.items())),
    max_size=20,
)


@given(steps, st.sampled_from([1, 64, 4096]), st.booleans())
@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
def test_a_stream_equals_the_shard_wherever_its_file_is_truncated(warm, steps, buffer, cached):
    if not cached:
        warm.remove(SMALL_URL)
    raw = warm.open(SMALL_URL).detach()
    data = warm.path(SMALL_URL)
    model = io.BytesIO(SMALL)
    with io.BufferedReader(raw, buffer) as stream:
        for what, number in steps:
            if what == "read":
                assert stream.read(number) == model.read(number)
            elif what == "readinto":
                ours, theirs = bytearray(number), bytearray(number)
                assert (stream.readinto(ours), ours) == (model.readinto(theirs), theirs)
            elif what in WHENCE:
                assert stream.seek(number, WHENCE[what]) == model.seek(number, WHENCE[what])
            elif data is not None and data.exists():
                os.truncate(data, min(number, data.stat().st_size))
            assert stream.tell() == model.tell()

"""The offsets of the samples of a shard, and the index file that states the samples per shard.

The file ``samples.idx`` in an entry has the offsets of its samples. They are a hint: `OpenShard`
replaces a file that does not fit the shard, and never returns bytes that are not one sample.

    problems   what is wrong with the archive, as JSON, and a NUL
    offsets    64 bits for each sample, and one more for the end of the last sample
    checksum   CRC-32 of the format, the entry's name, the problems and the offsets
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import math
import os
import re
import resource
import sys
import tarfile
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from weakref import WeakKeyDictionary, WeakValueDictionary
from zlib import crc32

from shardcache import clock, threads
from shardcache.archive import (
    MALFORMED,
    REPEATED,
    files_in,
    is_meta,
    key_and_field,
    members,
    unread,
)
from shardcache.errors import ConfigError, IntegrityError, ShardCacheError, ShardNotFoundError
from shardcache.faults import system_error
from shardcache.files import open_file, owned
from shardcache.layout import INDEX
from shardcache.reading.readers import UnversionedError
from shardcache.reading.stream import open_shard, stream_file
from shardcache.sync import atomic_write
from shardcache.threads import no_fork
from shardcache.urls import ShardURL, find_scheme
from shardcache.wds import group_files

if TYPE_CHECKING:
    from shardcache.cache import Cache, Handler

logger = logging.getLogger(__name__)

#: Offsets are in native byte order: a machine with another one finds another checksum.
_FORMAT = "samples2"
#: Suffixes of compressed archives.
_COMPRESSED = (".tgz", ".gz", ".bz2", ".xz", ".zst", ".lz4")
#: Shards to count at once: as many as `prewarm` downloads at once.
_JOBS = 32
#: Bytes per read while a stream skips the data of members.
_PIECE = 1 << 20


def find_samples(read: Callable[[int, int], bytes], end: int) -> tuple[array[int], list[str]]:
    """Find the samples of an archive by its headers, grouped as WebDataset groups files.

    Takes the arguments of `members`, and raises its errors. Returns the offset of each sample and
    of the end of the last one, and what is wrong with the archive: the first key that occurs again,
    the first file that its sample has twice, and bytes that no reader finds.
    """
    offsets, keys, fields, problems = array("q"), set[str](), set[str](), dict[str, str]()
    current, stop = None, 0
    for following, name in members(read, end):
        key, field = key_and_field(name)
        if key is not None and not is_meta(name):
            if key != current:
                current = key
                offsets.append(stop)
                if key in keys:
                    problems.setdefault("repeated", REPEATED.format(key))
                keys.add(key)
                fields.clear()
            if (field := field.lower()) in fields:
                text = f"the sample {key} has two files {field}, which is an error in WebDataset"
                problems.setdefault("twice", text)
            fields.add(field)
        if name:  # what follows the last file is no part of its sample
            stop = following
    offsets.append(stop)
    return offsets, [ascii(t)[1:-1] for t in (*problems.values(), unread(read, following)) if t]


class OpenShard:
    """A shard that is open for random access, and not evicted as long as this object exists.

    Threads may share it, and a forked child may use its parent's. A ``stream`` of the whole shard
    is taken over.

    Attributes:
        size: bytes of the shard, or 0 if it is streamed past the cache.
        is_cached: whether it is neither streamed nor a local file that is read in place.
        offsets, problems: as `find_samples` returns them.
        is_lost: whether the disk has failed, so that the shard should be opened again.
        used: when a sample was last read, on the monotonic clock.
    """

    _file: io.FileIO | None = None

    def __init__(self, cache: Cache, shard: ShardURL, stream: BinaryIO | None = None) -> None:
        refuse_compressed(shard)
        self.offsets: Sequence[int] = ()
        self.problems: list[str] = []
        self.is_lost = False
        self.used = clock.monotonic()
        self._cache = cache
        self._shard = shard
        self._stream = stream or open_shard(cache.process, shard, complete=True)
        self._lock = threading.Lock()  # held while the position of the stream matters
        self._url = shard.raw or str(shard)
        self._path = str(self._stream.name).removeprefix("file://")
        self.size = 0
        with contextlib.suppress(io.UnsupportedOperation):  # the shard bypasses the cache
            # When the disk fails, the stream closes its own descriptor. Another file may then get
            # the same number while another thread is about to read.
            self._file = owned(os.dup, (self._stream.fileno(),))
            # The size of the entry. If the file has been truncated since, `fstat` states less.
            self.size = self._stream.seek(0, os.SEEK_END)
        self.is_cached = self._file is not None and not cache.process.is_in_place(shard)
        self._directory = self._path.rpartition("/")[0]
        if not (self.is_cached and self._load()):
            self._make()

    def __del__(self, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        if is_exiting():  # the functions that `close` calls may be gone
            return
        # Python would warn of open files; if a signal handler raises here, it closes them itself.
        for file in (getattr(self, "_stream", None), self._file):
            if file is not None:
                file.close()

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def sample(self, number: int, handler: Handler) -> dict[str, Any]:
        """Read one sample: the same that a pipeline yields after `Cache.attach`.

        The caller counts the bytes, once per batch. The handler is called with the exception if a
        file cannot be added to the sample, as by WebDataset's ``group_by_keys``.
        """
        self.used = clock.monotonic()
        while True:
            offsets = self.offsets
            start, stop = offsets[number], offsets[number + 1]
            data = self._read(stop - start, start)
            try:
                if len(data) != stop - start:
                    raise tarfile.ReadError("unexpected end of data")
                shard = {"__url__": self._url, "__local_path__": self._path}
                files = files_in(data, shard)
                samples = list(group_files(files, handler))
                if len(samples) == 1:
                    return samples[0]
                problem = f"its bytes hold {len(samples)} samples"
            except (tarfile.TarError, ValueError) as exn:
                problem = str(exn.args[0] if exn.args else exn)
            self._make()
            if len(offsets) != len(self.offsets) or list(offsets) == list(self.offsets):
                raise IntegrityError(
                    f"{self._shard}: sample {number} cannot be read ({problem}). Run `shardcache "
                    "verify --repair` with this URL; if the shard is intact, pack it again.",
                    url=str(self._shard),
                )

    def _read(self, size: int, offset: int) -> bytes:
        """Read bytes, from the origin if the disk fails. Returns fewer bytes only at the end."""
        if self._is_local:
            try:
                return self._pread(size, offset)
            except system_error() as exn:
                self._lose(exn)
        # `no_fork`, because a child that is forked in the block would wait for the lock forever.
        with no_fork(), self._lock:
            try:
                self._stream.seek(offset)
                return self._stream.read(size)
            except UnversionedError:  # so read this sample in another response
                self._stream = open_shard(self._cache.process, self._shard)
                return self._read_on(size, offset)

    def _pread(self, size: int, offset: int) -> bytes:
        assert self._file is not None
        fd = self._file.fileno()
        data = os.pread(fd, size, offset)
        while len(data) < min(size, self.size - offset):  # Linux reads 2 GiB at most
            at = offset + len(data)
            if not (more := os.pread(fd, size - len(data), at)):
                raise OSError(errno.EIO, f"the file ends at byte {at} of {self.size}")
            data += more
        return data

    @property
    def _is_local(self) -> bool:
        return self._file is not None and not self.is_lost

    def _lose(self, problem: OSError) -> None:
        """Read through the stream from now on, which sets an entry aside that cannot be read."""
        logger.info("%s cannot be read at random: %s", self._path, problem)
        self.is_lost = True

    def _load(self) -> bool:
        """Read the offsets from the entry; return whether they fit the shard."""
        try:
            with open_file(f"{self._directory}/{INDEX}") as file:
                data = file.readall()
        except system_error() as exn:
            logger.debug("%s has no %s: %s", self._directory, INDEX, exn)
            return False
        if len(data) < 4 or data[-4:] != self._checksum(memoryview(data)[:-4]):
            return False
        problems, _, _ = data.partition(b"\0")
        self.problems = json.loads(problems)
        self.offsets = memoryview(data)[len(problems) + 1 : -4].cast("q")
        return True

    def _checksum(self, record: bytes | memoryview) -> bytes:
        """Return a checksum that also tells apart shards of the same size and layout."""
        key, name = self._directory.split("/")[-2:]
        return crc32(record, crc32(f"{_FORMAT} {key} {name}".encode())).to_bytes(4, "little")

    def _make(self) -> None:
        """Find the samples in the archive, and write the offsets into its entry."""
        try:
            offsets, self.problems = self._find()
        except tarfile.CompressionError as exn:
            raise _compressed(self._shard) from exn
        except (tarfile.TarError, ValueError) as exn:  # ValueError: a damaged extended header
            raise IntegrityError(
                f"{self._shard} is not a complete tar archive, so its samples cannot be read at "
                f"random ({exn}). Pack and upload it again.",
                url=str(self._shard),
            ) from exn
        self.offsets = offsets
        self.warn()
        if self.is_cached and not self.is_lost:
            self._store(json.dumps(self.problems).encode() + b"\0" + offsets.tobytes())

    def warn(self) -> None:
        """Log what is wrong with the archive."""
        warn = self._cache.process.notices.warn
        for problem in self.problems:
            warn(f"{self._shard.key} {problem}", MALFORMED, self._shard, problem)

    def _find(self) -> tuple[array[int], list[str]]:
        if self._is_local:
            try:
                return find_samples(self._pread, self.size)
            except system_error() as exn:
                self._lose(exn)
        with no_fork(), self._lock:
            self._stream.seek(0)
            return find_samples(self._read_on, sys.maxsize)

    def _read_on(self, size: int, offset: int) -> bytes:
        """Read at an offset; a seek over many bytes would be another request."""
        while (left := offset - self._stream.tell()) > 0:
            if not self._stream.read(min(left, _PIECE)):
                raise tarfile.ReadError("unexpected end of data")
        self._stream.seek(offset)  # back by a few blocks at most, which the buffer has
        return self._stream.read(size)

    def _store(self, record: bytes) -> None:
        store = self._cache.process.tier_of(self._path).store
        try:
            store.layout.write(Path(self._directory, INDEX), record + self._checksum(record))
        except (system_error(), ConfigError) as exn:  # the disk is full, read-only or unmounted
            logger.debug("%s gets no %s: %s", self._directory, INDEX, exn)


class OpenShards(OrderedDict[int, OpenShard]):
    """The open shards of a data set and its parts, or of a pipeline; the last one was used last.

    Nothing is closed here: a shard closes when no thread refers to it any more.
    """

    def __init__(self) -> None:
        super().__init__()
        self._windows: Any = WeakKeyDictionary()  # the shards that each part mixes
        _all[id(self)] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return OpenShards, ()

    def make_room(self, idle: float = -math.inf, most: float = math.inf) -> None:
        """Remove the oldest shards, so that one more may be open: those unused since ``idle``, and
        while there are ``most``; of all data sets, while these have half of the descriptors that
        the process may open, two per shard.
        """
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        in_process = math.inf if files < 0 else max(1, files // 4)
        # In another thread, the last one may have been removed.
        with contextlib.suppress(KeyError, RuntimeError, StopIteration, ValueError):
            while sum(map(len, each := [*_all.values()])) >= in_process:
                min(filter(None, each), key=OpenShards._first_used).popitem(last=False)
            while len(self) >= most or self._first_used() < idle:
                self.popitem(last=False)

    def _first_used(self) -> float:
        return next(iter(self.values())).used

    def keep(self, part: object, window: frozenset[int]) -> None:
        """Remove all shards but those that the parts mix; ``part`` mixes those of ``window``."""
        self._windows[part] = window
        # Not by iteration, during which another thread may add a part.
        windows = (self._windows.data.get(key, ()) for key in self._windows.keyrefs())
        for position in self.keys() - frozenset[int]().union(*windows):
            self.pop(position, None)


#: Those of this process, by identity.
_all = WeakValueDictionary[int, OpenShards]()


def refuse_compressed(shard: ShardURL) -> None:
    """Raise ConfigError if the name of a shard is that of a compressed archive."""
    if shard.basename.lower().endswith(_COMPRESSED):
        raise _compressed(shard)


def _compressed(shard: ShardURL) -> ConfigError:
    return ConfigError(
        f"{shard} is compressed, so its samples cannot be read at random. Unpack it to a plain "
        ".tar, or read it in sequence with cache.attach(wds.WebDataset(...)).",
        url=str(shard),
    )


# -- data sets -------------------------------------------------------------------------------


def count_samples(
    cache: Cache, shards: Sequence[ShardURL]
) -> Iterator[tuple[int, tuple[int, int] | Exception]]:
    """Count the samples of shards, many at once; downloads those that are not cached.

    Yields the position of each shard, and its samples and bytes (0 bytes if it was streamed) or its
    error, as `threads.each` does.
    """

    def count(shard: ShardURL) -> tuple[int, int] | Exception:
        try:
            opened = OpenShard(cache, shard)
            opened.warn()
            return len(opened), opened.size
        except (ShardCacheError, system_error()) as exn:
            return exn

    return threads.each(count, shards, _JOBS, "shardcache-index")


def read_index_file(cache: Cache, path: str) -> tuple[list[ShardURL], list[int]]:
    """Read the shards of a data set, and how many samples each has, from a JSON file.

    The file is that of wids, with a ``shardlist`` of ``url`` and ``nsamples``, or a ``sizes.json``
    with the number of samples by name. Relative names are next to the file.
    """
    file = cache.parse(path)
    if file.is_local and not file.local_path.exists():
        advice = f"Write it with `shardcache index SPEC -o {path}`."
        raise ShardNotFoundError(f"there is no index file {path}. {advice}", url=path)
    local = open(file.local_path, "rb") if file.is_local else None  # noqa: SIM115
    with local or stream_file(cache.process, file) as stream:
        text = stream.read()
    try:
        record = json.loads(text)
        listed = record.get("shardlist")
        pairs = record.items() if listed is None else [(s["url"], s["nsamples"]) for s in listed]
        sound = (type(u) is str and type(n) is int and 0 <= n < 1 << 40 for u, n in pairs)
        if not pairs or not all(sound):
            raise ValueError("it must state a number of samples for each shard")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as exn:
        raise ConfigError(
            f"{file} is not an index of shards ({type(exn).__name__}: {exn}). Write it with "
            f"`shardcache index SPEC -o {file.basename}`."
        ) from exn
    path = re.split("[?#]", path)[0] if find_scheme(file.scheme).is_web else path
    base = path[: path.rfind("/") + 1]
    is_absolute = re.compile("/|[a-z][a-z0-9+.-]*:", re.IGNORECASE).match
    urls = [cache.parse(url if is_absolute(url) else base + url) for url, _ in pairs]
    return urls, [count for _, count in pairs]


def write_index_file(path: Path, counts: Mapping[str, int]) -> None:
    """Write an index file in the form of wids, from the number of samples by URL."""
    rows = [json.dumps({"url": url, "nsamples": count}) for url, count in counts.items()]
    with atomic_write(path, "w") as file:
        file.write('{"wids_version": 1, "shardlist": [\n' + ",\n".join(rows) + "\n]}\n")

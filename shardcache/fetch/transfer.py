"""The fetch engine: one object into one partial, over several connections.

    first answer -> size, version -> parts, first in first out -> workers
    worker: recv into its 1 MiB block -> hash while warm -> pwrite -> record

* The first range request tells size and version, so no request precedes it; the
  same response delivers the first part. All further requests insist on that
  version. Where one part is all, by a listing or by what its neighbours have, it
  is no range, which S3 answers with the checksum, too: one request for a shard.
* A worker that loses its connection goes on at the byte it had reached. What
  counts as progress resets the retries, so they bound consecutive failures.
* Memory is one block per connection, whatever the size of the shard.
* The calling thread is the first worker: small shards start no threads, and an
  interrupt reaches the work itself.

A `Fetcher` may be used by any number of threads; its connections are shared by
all of them, shards first come first served. Make one per process.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable

from shardcache.clock import Clock
from shardcache.errors import FetchCancelledError, IntegrityError, TransferError
from shardcache.fetch.connections import Lane, Lanes
from shardcache.fetch.job import Fetched, FetchStatus, Job
from shardcache.fetch.waiting import Cancellation, Watch
from shardcache.origins.base import Body, ObjectInfo, Origin, VersionChangedError, WholeOrigin
from shardcache.origins.retry import Attempts, RetryPolicy
from shardcache.store.digest import MismatchError
from shardcache.store.partial import Partial
from shardcache.urls import ShardURL

__all__ = ["FetchStatus", "Fetched", "Fetcher", "Sizes"]

logger = logging.getLogger(__name__)


#: An object that is rewritten faster than it can be read, this often in a row,
#: is reported instead of chased.
_VERSION_RESTARTS = 4


class Fetcher:
    """Fetches shards.

    Args:
        policy: retries and deadline.
        clock: time.
        connections: cap on simultaneous requests of this process; see `lanes`.
        part_size: bytes per request; None for what suits the link.
        timeout: seconds without enough bytes before a request is repeated.
    """

    def __init__(
        self,
        policy: RetryPolicy,
        clock: Clock,
        *,
        connections: int,
        part_size: int | None,
        timeout: float,
    ) -> None:
        self.policy = policy
        self.clock = clock
        self.timeout = timeout
        self.lanes = Lanes(connections, part_size, clock.monotonic)
        self._sizes = Sizes()
        self._jobs: weakref.WeakSet[Job] = weakref.WeakSet()  # an interrupt may leave one
        self._guard = threading.Lock()
        self.cancellation = Cancellation()

    def fetch(
        self,
        origin: Origin,
        url: ShardURL,
        *,
        target: Callable[[ObjectInfo], Partial],
        resume: Partial | None = None,
        status: FetchStatus | None = None,
    ) -> Fetched:
        """Bring one object into a partial.

        On an error the partial is let go: kept for a later resume after a
        transient error, removed when its bytes are of no use.

        Args:
            origin: where from.
            url: which shard.
            target: makes the partial once size and version are known; it may
                refuse by raising.
            resume: what an earlier fetch left.
            status: is kept up to date.

        Raises:
            ShardNotFoundError, AccessDeniedError, ConfigError: for good.
            TransferError, TransferTimeoutError: after all retries.
            IntegrityError: the bytes are not what the origin states.
            OSError: the local disk failed (full, read-only, broken).
            Whatever ``target`` raises.
        """
        attempts = self.policy.started(str(url))
        status = told = status or FetchStatus()
        watch = self.cancellation.watch(str(url), self.clock, lambda: told.called_off)
        damaged = False
        for _ in range(_VERSION_RESTARTS):
            try:
                return self._fetch_version(origin, url, target, resume, attempts, status, watch)
            except VersionChangedError:
                logger.warning("%s changed while it was fetched; starting over", url)
            except MismatchError as exn:
                if damaged:
                    raise IntegrityError(
                        f"{url}: the origin states {exn.checksum.algorithm} "
                        f"{exn.checksum.value}, the bytes it sent twice have {exn.found}. "
                        "The object or the path to it is damaged; upload it again.",
                        url=str(url),
                    ) from None
                damaged = True
                logger.warning("%s arrived damaged; fetching it again", url)
            resume = None
        raise TransferError(
            f"{url} changed {_VERSION_RESTARTS} times while it was fetched. "
            "Wait until the dataset is written, then try again.",
            url=str(url),
        )

    def _fetch_version(
        self,
        origin: Origin,
        url: ShardURL,
        target: Callable[[ObjectInfo], Partial],
        resume: Partial | None,
        attempts: Attempts,
        status: FetchStatus,
        watch: Watch,
    ) -> Fetched:
        with Lane(self.lanes) as lane:
            watch.check()
            if resume is not None:
                job = Job(self, origin, url, resume, attempts, status)
                return self._run(job, None, watch, lane)
            body, described = attempts.call(
                lambda: self._first(origin, url, status), sleep=watch.sleep
            )
            self._sizes.learn(url, body.info.size)
            try:
                watch.check()
                partial = target(body.info)
            except OSError:  # there is no room: whoever streams the shard reads this answer
                if status.near:
                    body.close()
                else:
                    status.offer(body)
                raise
            except Exception:
                body.close()
                raise
            job = Job(self, origin, url, partial, attempts, status, described=described)
            return self._run(job, body, watch, lane)

    def _first(self, origin: Origin, url: ShardURL, status: FetchStatus) -> tuple[Body, bool]:
        """The first answer, and whether it said all there is to know of the object."""
        part = self.lanes.part()
        asked = self.clock.monotonic()
        body = self._whole(origin, url, part, status.listed)
        described = body is not None
        # Where there may be no room all is asked for: the shard is then streamed from this
        # answer. If it can be stored after all, the answer is cut off after its first part.
        body = body or origin.open(url, 0, None if status.roomless else part)
        self.lanes.answered(self.clock.monotonic() - asked)
        if body.info.identifiable or body.stop in (None, body.info.size):
            return body, described
        # Parts of it could be of different versions: it must come in one answer.
        body.close()
        return origin.open(url, 0, None), False

    def likely_size(self, url: ShardURL, listed: int | None) -> int | None:
        """How many bytes a shard probably has: what a listing says, else as its neighbours."""
        return listed if listed is not None else self._sizes.guess(url)

    def _whole(self, origin: Origin, url: ShardURL, part: int, listed: int | None) -> Body | None:
        """The first part as the beginning of the whole, where that is probably all."""
        likely = self.likely_size(url, listed)
        if likely is None or likely > part or not isinstance(origin, WholeOrigin):
            return None
        body = origin.whole(url, part, listed)
        if listed is None and (body is None or body.stop != body.info.size):
            self._sizes.missed(url)
        return body

    def _run(self, job: Job, first: Body | None, watch: Watch, lane: Lane) -> Fetched:
        try:
            with self._guard:
                self._jobs.add(job)
            try:
                watch.check()  # called off before it was among the jobs
            except FetchCancelledError:
                job.cancel()
            return job.run(first, lane)
        finally:
            with self._guard:
                self._jobs.discard(job)

    def cancel(self) -> None:
        """Call off every fetch in flight, and every wait for one: `FetchCancelledError`."""
        self.cancellation.call_off()
        with self._guard:
            jobs = list(self._jobs)
        for job in jobs:
            job.cancel()


#: Folders that are remembered.
_MOST = 256
#: So often a guess may be wrong in one folder; then there are none any more.
_MISSES = 2


class Sizes:
    """Sizes of the latest shards, by folder. Safe between threads."""

    def __init__(self) -> None:
        self._latest: dict[str, int] = {}
        self._misses: dict[str, int] = {}
        self._guard = threading.Lock()

    def learn(self, url: ShardURL, size: int | None) -> None:
        """Note how long a shard is; None where nobody knows."""
        with self._guard:
            folder = _folder(url)
            self._latest.pop(folder, None)
            if size is None or self._misses.get(folder, 0) >= _MISSES:
                return
            if len(self._latest) >= _MOST:
                del self._latest[next(iter(self._latest))]
            self._latest[folder] = size

    def guess(self, url: ShardURL) -> int | None:
        """The size of the latest shard beside it; None without one."""
        return self._latest.get(_folder(url))

    def missed(self, url: ShardURL) -> None:
        """Note that what a guess said of a shard was of no use."""
        with self._guard:
            folder = _folder(url)
            self._latest.pop(folder, None)
            if len(self._misses) >= _MOST:
                self._misses.clear()
            self._misses[folder] = self._misses.get(folder, 0) + 1


def _folder(url: ShardURL) -> str:
    return str(url).rpartition("/")[0]

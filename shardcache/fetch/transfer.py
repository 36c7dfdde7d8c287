"""The fetch engine: one object into one partial, over several connections.

    first answer -> size, version -> parts, first in first out -> caller and helpers (`job`)

* The first range request tells size and version, so no request precedes it; the
  same response delivers the first part. All further requests insist on that
  version. Where one part is all, by a listing or by what its neighbours have, it
  is no range, which S3 answers with the checksum, too: one request for a shard.
* A thread that loses its connection goes on at the byte it had reached. What
  counts as progress resets the retries, so they bound consecutive failures.
* Memory is one block per connection, whatever the size of the shard.
* The calling thread fetches, too: small shards need no other thread, and an
  interrupt reaches the work itself.

A `Fetcher` may be used by any number of threads; all of them share its connections. Make one per
process.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

from shardcache.errors import IntegrityError, TransferError
from shardcache.fetch.connections import Connections
from shardcache.fetch.job import Fetched, Job
from shardcache.fetch.status import FetchStatus
from shardcache.origins.base import Body, ObjectInfo, Origin, VersionChangedError
from shardcache.origins.retry import Attempts, RetryPolicy
from shardcache.stats.counters import Counters
from shardcache.store.digest import MismatchError
from shardcache.store.partial import Partial
from shardcache.urls import ShardURL

__all__ = ["Fetcher"]

logger = logging.getLogger(__name__)


#: Folders whose largest shard is remembered.
_FOLDERS = 256
#: An object that is rewritten faster than it can be read, this often in a row,
#: is reported instead of chased.
_VERSION_RESTARTS = 4


class Fetcher:
    """See the module.

    Args:
        policy: how often and how long to try.
        counters: count the bytes that arrive.
        connections: of this process.
    """

    def __init__(self, policy: RetryPolicy, counters: Counters, connections: Connections) -> None:
        self.policy = policy
        self._counters = counters
        self.connections = connections
        self._largest: dict[str, int] = {}  # bytes of the largest shard so far, by folder

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
        status = status or FetchStatus()
        damaged = False
        for _ in range(_VERSION_RESTARTS):
            try:
                return self._fetch_version(origin, url, target, resume, attempts, status)
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
    ) -> Fetched:
        def begin(partial: Partial, *, described: bool = False) -> Job:
            parts = self.connections, origin, url, partial, attempts, status, self._counters
            return Job(*parts, described=described)

        job = None if resume is None else begin(resume)
        body = None
        try:
            with self.connections.one():
                status.check(str(url))
                if job is None:
                    body, described = attempts.call(
                        lambda: self._first(origin, url, status),
                        sleep=lambda seconds: status.sleep(seconds, str(url)),
                    )
                    self._learn(url, body.info.size)
                    status.check(str(url))
                    try:
                        partial = target(body.info)
                    except OSError:  # there is no room: who streams the shard reads this answer
                        if not status.upstream:
                            status.offer(body)
                            body = None
                        raise
                    job = begin(partial, described=described)
                job.receive(body)
            return job.finish()
        except BaseException as exn:
            if job is not None:
                job.abandon(exn)
            if body is not None:
                body.close()
            raise

    def _first(self, origin: Origin, url: ShardURL, status: FetchStatus) -> tuple[Body, bool]:
        """The first answer, and whether it says all that the origin states of the object."""
        part = self.connections.part
        likely = self.likely_size(url, status.listed)
        small = likely is not None and 0 < likely <= part
        # Where there may be no room all is asked for: the shard is then streamed from this
        # answer. If it can be stored after all, the answer is cut off after its first part.
        whole = small or status.roomless
        body = origin.open(url, 0, None if whole else part)
        self.connections.answered(body.waited)
        if not body.info.identifiable:
            if body.stop in (None, body.info.size):
                return body, whole
            # Parts of it could be of different versions: it must come in one answer.
            body.close()
            return origin.open(url, 0, None), True
        if small and not status.roomless and body.stop is not None:
            body.stop = min(body.stop, part)  # it grew since: other connections take the rest
        return body, whole

    def likely_size(self, url: ShardURL, listed: int | None) -> int | None:
        """Bytes that a shard probably has at most: what a listing says, else as its neighbours."""
        return self._largest.get(_folder(url)) if listed is None else listed

    def _learn(self, url: ShardURL, size: int | None) -> None:
        """Note how long a shard is; None where nobody knows."""
        folder = _folder(url)
        known = self._largest.get(folder, 0)
        if len(self._largest) >= _FOLDERS and not known:
            self._largest.clear()
        self._largest[folder] = max(known, sys.maxsize if size is None else size)


def _folder(url: ShardURL) -> str:
    return str(url).rpartition("/")[0]

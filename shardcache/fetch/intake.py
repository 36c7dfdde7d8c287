"""One shard from its origin to a published entry, for whoever has the right to fetch it.

    a partial of a dead process ----> resumed ---.
      | none                                     |
    the budget admits it, a partial is begun ----+---> fetched, checked ---> published

What fails leaves no partial but one that can be resumed. Who may fetch is decided by
`coordination`. Safe between threads.
"""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardcache.breaker import FULL
from shardcache.clock import Clock, boot_id
from shardcache.config import Config
from shardcache.errors import (
    CacheFullError,
    FetchCancelledError,
    IntegrityError,
    LockTimeoutError,
    ShardCacheError,
)
from shardcache.fetch.transfer import Fetched, Fetcher, FetchStatus
from shardcache.layout import list_names, parse_partial_name
from shardcache.locks.flock import Holder, KeyLock
from shardcache.locks.lease import KeyLease
from shardcache.origins.base import ObjectInfo, Origin
from shardcache.origins.resolve import Origins
from shardcache.space.budget import Space
from shardcache.store.digest import check_archive
from shardcache.store.entry import Metadata, versions
from shardcache.store.partial import Partial
from shardcache.store.store import Store
from shardcache.urls import ShardURL
from shardcache.version import __version__

__all__ = ["Intake", "Place", "Right"]

logger = logging.getLogger(__name__)


class Right:
    """Why a process fetches a key: it has its lock, or has waited for too long.

    Args:
        lock: the key's; None for a private fetch.
        holder: who we are.
    """

    def __init__(self, lock: KeyLock | KeyLease | None, holder: Holder) -> None:
        self.lock = lock
        self._holder = holder

    def tell(self, partial: Partial, size: int | None) -> None:
        """Say in the lock's record where the shard grows, for those who wait.

        Raises:
            OSError: the disk fails.
        """
        if self.lock is not None:
            self.lock.update(replace(self._holder, partial=partial.path.name, size=size))


@dataclass(frozen=True, slots=True)
class Place:
    """A tier, for a newcomer.

    Attributes:
        store: where entries are published.
        space: the budget.
    """

    store: Store
    space: Space


class Intake:
    """See the module.

    Args:
        places: in the order in which they are filled; the last one is always there.
        fetcher: the engine.
        origins: where shards come from.
        config: checks.
        clock: time.
    """

    def __init__(
        self,
        places: Sequence[Place],
        *,
        fetcher: Fetcher,
        origins: Origins,
        config: Config,
        clock: Clock,
    ) -> None:
        self._places = list(places)
        self._fetcher = fetcher
        self._origins = origins
        self._config = config
        self._clock = clock

    def fetch(self, url: ShardURL, right: Right, status: FetchStatus) -> Path:
        """Fetch and publish; the entry's directory.

        Raises:
            ShardNotFoundError, AccessDeniedError, ConfigError, TransferError,
            IntegrityError: the origin cannot serve it.
            CacheFullError: it cannot be stored.
            partials.LostError: somebody took the partial away.
            OSError: the local disk failed.
        """
        known = frozenset(
            path for place in self._places for path, _ in versions(place.store.layout, url.key)
        )
        # A copy of what the origin has replaced may still be in an upstream.
        for upstream in () if status.outdated else self._origins.nearer(url):
            try:
                status.near = True
                fetched = self._fetch(upstream, url, right, status)
                if upstream.digest in (None, fetched.digest):
                    return self._publish(url, fetched, known)
                fetched.partial.discard()
                upstream.distrust()
                logger.warning("%s: its copy in %s is damaged", url, upstream.name)
            except (FetchCancelledError, CacheFullError):
                raise
            except ShardCacheError as exn:
                logger.info("%s: not from %s: %s", url, upstream.name, exn)
        status.near = False
        return self._publish(url, self._fetch(self._origins.of(url), url, right, status), known)

    def _fetch(self, origin: Origin, url: ShardURL, right: Right, status: FetchStatus) -> Fetched:
        places = deque(self._places)
        while True:
            resume = self._resume(url)
            if resume is not None:
                right.tell(resume, resume.metadata.info.size)
            else:
                self._ask_for_room(url, status)
            try:
                return self._fetcher.fetch(
                    origin,
                    url,
                    target=lambda info: self._target(url, info, right, places),
                    resume=resume,
                    status=status,
                )
            except OSError as exn:
                # What was admitted may still find no room: others write there, too.
                full = exn.errno in FULL and not isinstance(exn, ShardCacheError)
                if not full or len(places) == 1:
                    raise
                logger.info("%s: %s is full (%s)", url, places[0].store.layout.base, exn)
                places.popleft()

    def _ask_for_room(self, url: ShardURL, status: FetchStatus) -> None:
        """Ask no origin for what there is no room for, as far as both are known."""
        size = self._fetcher.likely_size(url, status.listed)
        if size is None:
            return
        answers = [place.space.refuses(str(url), size) for place in self._places]
        refusals = [answer for answer in answers if answer is not None]
        if len(refusals) == len(answers):
            raise refusals[-1]

    def _place_of(self, partial: Partial) -> Place:
        """Where a partial lies."""
        above = partial.path.parent
        return next(place for place in self._places if place.store.layout.partial == above)

    def _publish(self, url: ShardURL, fetched: Fetched, known: Collection[Path]) -> Path:
        partial = fetched.partial
        try:
            self._validate(url, partial)
            metadata = self._metadata(
                url, fetched.info, fetched.size, fetched.digest, fetched.checked
            )
            sync = self._config.fsync == "fsync"
            store = self._place_of(partial).store
            entry = store.publish(partial, metadata, sync=sync, known=known)
        except BaseException:
            partial.discard()
            raise
        partial.close()
        return entry

    def _resume(self, url: ShardURL) -> Partial | None:
        """Take over what a dead process left of this shard."""
        for place in self._places:
            layout = place.store.layout
            for name in list_names(layout.partial):
                parsed = parse_partial_name(name)
                if parsed is not None and parsed[0] == url.key:
                    partial = Partial.claim(layout, layout.partial / name, url.basename)
                    if partial is not None:
                        logger.info("%s: resuming at %d bytes", url, partial.written)
                        return self._readmit(url, partial, place.space)
        return None

    def _readmit(self, url: ShardURL, partial: Partial, space: Space) -> Partial:
        """A dead process's reservation lapsed: the budget may have been given to others."""
        try:
            # Claimed, it is live again and counts with its final size: nothing to add.
            size = partial.metadata.info.size
            return space.admit(str(url), size, lambda: partial, reserved=True)
        except BaseException:
            partial.close()
            raise

    def _target(
        self, url: ShardURL, info: ObjectInfo, right: Right, places: deque[Place]
    ) -> Partial:
        """Begin a partial in the first place that has room; those before it are taken off."""
        metadata = self._metadata(url, info, info.size or 0)
        if info.size is None:  # who knows whether it fits anywhere but where most room is
            while len(places) > 1:
                places.popleft()
        while True:
            layout, space = places[0].store.layout, places[0].space
            begin = functools.partial(Partial.create, layout, metadata, url.basename)
            try:
                partial = space.admit(str(url), info.size, begin)
                break
            except OSError as exn:  # CacheFullError is one
                if len(places) == 1 or isinstance(exn, LockTimeoutError):
                    raise
                logger.debug("%s: not into %s: %s", url, layout.base, exn)
                places.popleft()
        try:
            right.tell(partial, info.size)
        except BaseException:
            partial.discard()  # or its lock would reserve room until this process ends
            raise
        return partial

    def _metadata(
        self,
        url: ShardURL,
        info: ObjectInfo,
        size: int,
        digest: str = "",
        checked: str | None = None,
    ) -> Metadata:
        return Metadata(
            url=str(url),
            key=url.key,
            info=info,
            size=size,
            digest=digest,
            checked=checked,
            fetched_at=self._clock.time(),
            boot=boot_id(),
            library=__version__,
        )

    def _validate(self, url: ShardURL, partial: Partial) -> None:
        check_archive(partial.fd, url.basename, str(url))
        if self._config.validate is None:
            return
        try:
            self._config.validate(partial.data)
        except Exception as exn:  # a user's check may raise anything: that is its answer
            raise IntegrityError(
                f"{url} was refused by the validate hook: {type(exn).__name__}: {exn}. "
                "Look at the object, or at the hook.",
                url=str(url),
            ) from exn

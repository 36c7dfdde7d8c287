"""One shard from its origin to a published entry, for whoever has the right to fetch it.

    a partial of a dead process ----> resumed ---.
      | none                                     |
    the budget admits it, a partial is begun ----+---> fetched, checked ---> published

What fails leaves no partial but one that can be resumed. Who may fetch is decided by
`coordination`. Safe between threads.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from shardcache.clock import Clock
from shardcache.config import Config
from shardcache.entry import versions
from shardcache.errors import IntegrityError
from shardcache.layout import list_names, parse_partial_name
from shardcache.leases import KeyLease
from shardcache.locks import Holder, KeyLock
from shardcache.metadata import Metadata, boot_id
from shardcache.origin import ObjectInfo
from shardcache.origins import Origins
from shardcache.partials import Partial
from shardcache.space import Space
from shardcache.store import Store
from shardcache.transfer import Fetcher, FetchStatus
from shardcache.urls import ShardURL
from shardcache.validation import check_archive
from shardcache.version import __version__

__all__ = ["Intake", "Right"]

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


class Intake:
    """See the module.

    Args:
        store: where entries are published.
        fetcher: the engine.
        origins: where shards come from.
        space: the budget.
        config: checks.
        clock: time.
    """

    def __init__(
        self,
        store: Store,
        *,
        fetcher: Fetcher,
        origins: Origins,
        space: Space,
        config: Config,
        clock: Clock,
    ) -> None:
        self._store = store
        self._fetcher = fetcher
        self._origins = origins
        self._space = space
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
        origin = self._origins.of(url)
        known = frozenset(path for path, _ in versions(self._store.layout, url.key))
        resume = self._resume(url)
        if resume is not None:
            right.tell(resume, resume.metadata.info.size)
        fetched = self._fetcher.fetch(
            origin,
            url,
            target=lambda info: self._target(url, info, right),
            resume=resume,
            status=status,
        )
        partial = fetched.partial
        try:
            self._validate(url, partial)
            metadata = self._metadata(
                url, fetched.info, fetched.size, fetched.digest, fetched.checked
            )
            sync = self._config.fsync == "fsync"
            entry = self._store.publish(partial, metadata, sync=sync, known=known)
        except BaseException:
            partial.discard()
            raise
        partial.close()
        return entry

    def _resume(self, url: ShardURL) -> Partial | None:
        """Take over what a dead process left of this shard."""
        layout = self._store.layout
        for name in list_names(layout.partial):
            parsed = parse_partial_name(name)
            if parsed is not None and parsed[0] == url.key:
                partial = Partial.claim(layout, layout.partial / name, url.basename)
                if partial is not None:
                    logger.info("%s: resuming at %d bytes", url, partial.written)
                    return self._readmit(url, partial)
        return None

    def _readmit(self, url: ShardURL, partial: Partial) -> Partial:
        """A dead process's reservation lapsed: the budget may have been given to others."""
        try:
            # Claimed, it is live again and counts with its final size: nothing to add.
            return self._space.admit(str(url), 0, lambda: partial)
        except BaseException:
            partial.close()
            raise

    def _target(self, url: ShardURL, info: ObjectInfo, right: Right) -> Partial:
        metadata = self._metadata(url, info, info.size or 0)
        partial = self._space.admit(
            str(url),
            info.size,
            lambda: Partial.create(self._store.layout, metadata, url.basename),
        )
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

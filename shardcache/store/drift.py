"""Whether the origin still has the version of a shard that is cached.

One request for a description per shard; nothing of the shard itself is fetched. An origin
that does not answer is left alone after a few shards: asking it for each of thousands, with
all retries, would take days and tell nothing more.

Safe between threads.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from enum import StrEnum

from shardcache.errors import ConfigError, ShardCacheError, ShardNotFoundError, TransferError
from shardcache.origins.base import ObjectInfo
from shardcache.origins.resolve import Origins
from shardcache.origins.retry import RetryPolicy
from shardcache.store.metadata import Metadata
from shardcache.urls import ShardURL, redact

__all__ = ["Answer", "Drift", "differs"]

#: Shards of one bucket or host in a row, each with all its attempts, that get no answer
#: before the others are not asked for.
_SILENT = 3


class Answer(StrEnum):
    """What an origin says of a version that is cached."""

    SAME = "same"
    CHANGED = "changed"
    GONE = "gone"
    UNREACHABLE = "unreachable"


class Drift:
    """Asks origins.

    Args:
        origins: where shards come from.
        policy: how often each is asked.
        parse: names the shard of a sidecar's URL.
        sleep: how to wait between attempts; may raise.
    """

    def __init__(
        self,
        origins: Origins,
        policy: RetryPolicy,
        parse: Callable[[str], ShardURL],
        sleep: Callable[[float], None],
    ) -> None:
        self._origins = origins
        self._policy = policy
        self._parse = parse
        self._sleep = sleep
        self._guard = threading.Lock()
        self._silent: Counter[str] = Counter()

    def now(self, metadata: Metadata) -> ObjectInfo | tuple[Answer, str]:
        """What the origin has under the URL of a sidecar now, or why that is not known.

        Raises:
            Whatever ``sleep`` raises.
        """
        if metadata.url.startswith("pipe:"):
            return Answer.UNREACHABLE, "it is what a command wrote, which states no version"
        try:
            shard = self._parse(metadata.url)
        except ConfigError as exn:
            return Answer.UNREACHABLE, exn.message
        if shard.key != metadata.key:
            return Answer.UNREACHABLE, "it came from another endpoint than the one configured"
        place = f"{shard.scheme} {'/'.join(str(shard).split('/')[:3])}"
        if self._silent[place] >= _SILENT:
            return Answer.UNREACHABLE, f"not asked: {_SILENT} shards before it got no answer"
        try:
            found = self._ask(shard)
        except ShardNotFoundError:
            return Answer.GONE, "the origin has it no longer"
        except TransferError as exn:
            with self._guard:
                self._silent[place] += 1
            return Answer.UNREACHABLE, redact(str(exn.__cause__ or exn))
        except ShardCacheError as exn:
            return Answer.UNREACHABLE, exn.message
        with self._guard:
            self._silent[place] = 0
        return found

    def _ask(self, shard: ShardURL) -> ObjectInfo:
        origin = self._origins.of(shard)
        attempts = self._policy.started(str(shard))
        return attempts.call(lambda: origin.stat(shard), sleep=self._sleep)


def differs(then: ObjectInfo, now: ObjectInfo) -> str | None:
    """How the origin's version differs from the one that was fetched; None if it does not.

    Raises:
        ValueError: they have nothing in common that tells versions apart.
    """
    if then.version_id and now.version_id and "null" not in (then.version_id, now.version_id):
        if then.version_id == now.version_id:
            return None
        return f"version {now.version_id} instead of {then.version_id}"
    if then.size is not None and now.size is not None and then.size != now.size:
        return f"{now.size} bytes instead of {then.size}"
    if then.etag and now.etag:
        # What a gateway compresses on its way gets a weak validator, and is the same object.
        if then.etag.removeprefix("W/") == now.etag.removeprefix("W/"):
            return None
        return f"ETag {now.etag} instead of {then.etag}"
    if then.modified and now.modified:
        if then.modified == now.modified:
            return None
        return f"modified {now.modified}, not {then.modified}"
    raise ValueError("the origin states nothing that tells versions apart")

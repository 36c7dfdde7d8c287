"""What is there: shards behind a prefix or a pattern, and sizes without one request each.

S3 is listed with the client and the credentials that fetch from it, a thousand
keys per request; everything else through its fsspec filesystem. A listing is
never taken for the truth about an object: sizes found here serve planning only,
and every fetch learns its own.

A `Listing` belongs to one thread of one process; clients are made on first use.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from shardcache.clock import SYSTEM_CLOCK
from shardcache.config import Config
from shardcache.errors import (
    AccessDeniedError,
    ConfigError,
    ShardCacheError,
    ShardNotFoundError,
    TransferError,
)
from shardcache.origins.endpoints import scheme_options
from shardcache.origins.filesystem import FsspecOrigin
from shardcache.origins.retry import RetryPolicy
from shardcache.origins.s3 import S3Origin
from shardcache.urls import ShardURL, parse_url, redact

__all__ = ["Listing", "is_pattern", "refuse_local"]

logger = logging.getLogger(__name__)
T = TypeVar("T")

#: What counts as a shard below a prefix. Their sidecars (.tar.idx, .json, .md5) do not.
_SHARD = re.compile(r"\.(tar|tgz|tar\.(gz|bz2|xz|zst|lz4))\Z", re.IGNORECASE)
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
#: A question mark before ``name=`` begins a query (``?versionId=``), it is no wildcard.
_WILDCARD = re.compile(r"\*|\?(?![A-Za-z][A-Za-z0-9_.-]*=)")
_S3 = frozenset({"s3", "s3a", "s3n"})
_HTTP = frozenset({"http", "https"})
#: ListObjectsV2 returns at most this many keys per request.
_PAGE = 1000
#: Requests spent on learning sizes beyond one per `_PAGE` shards: what sparse names
#: cost, few enough that giving up comes within seconds.
_SPARE_PAGES = 16
#: Shards in more directories than this are looked up bucket by bucket.
_MANY_DIRECTORIES = 16
#: Seconds without a byte from a listing: sizes only make a plan better.
_SIZE_TIMEOUT = 10.0
_LEAST_PATIENCE = 0.5


def is_pattern(url: str) -> bool:
    """Whether ``url`` stands for what a listing finds: a prefix with ``/`` at its end,
    or a name with ``*`` or ``?`` in it.
    """
    found = _SCHEME.match(url)
    scheme = found[1].lower() if found else "file"
    if scheme == "pipe":
        return False
    if scheme in _HTTP:  # a query, and a directory that is a document, look the same
        return "*" in url.partition("?")[0]
    return url.endswith("/") or _WILDCARD.search(url) is not None


def refuse_local(shard: ShardURL, config: Config) -> None:
    """Refuse to fetch what is read where it lies.

    Raises:
        ConfigError: it is a local path, and those are not cached.
    """
    if shard.is_local and not config.cache_local:
        raise ConfigError(
            f"{shard.local_path} is a local path, and those are read where they are. "
            "Set cache_local = true (SHARDCACHE_CACHE_LOCAL=1) to cache slow mounts.",
            url=str(shard),
        )


class Listing:
    """Lists the origins of one configuration.

    Args:
        config: endpoint, storage options, time-outs.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._patience = min(config.timeout, _SIZE_TIMEOUT)
        self._end = float("inf")
        self._s3: S3Origin | None = None

    def matches(self, pattern: str) -> list[str]:
        """The shards that ``pattern`` stands for, in lexical order.

        ``*`` and ``?`` match within one part of the path, ``**`` across parts; a
        ``/`` at the end means every tar file below.

        Raises:
            ShardNotFoundError: there is none.
            AccessDeniedError, ConfigError, TransferError: it cannot be listed.
        """
        found = _SCHEME.match(pattern)
        scheme = found[1].lower() if found else "file"
        urls = self._s3_matches(pattern) if scheme in _S3 else self._other_matches(pattern)
        if not urls:
            what = "no shards below it" if pattern.endswith("/") else "nothing matches"
            raise ShardNotFoundError(
                f"{redact(pattern)}: {what}. Check the spelling and the endpoint.",
                url=redact(pattern),
            )
        return urls

    def _s3_matches(self, pattern: str) -> list[str]:
        root, wanted, deep = _split(pattern)
        bucket, slash, prefix = root.partition("://")[2].partition("/")
        bucket = bucket.rpartition("@")[2]
        if not bucket or not slash:
            raise ConfigError(f"{redact(pattern)}: a bucket's name has to be given in full")
        options = {} if deep else {"Delimiter": "/"}
        urls: list[str] = []
        page: _Page | None = None
        while page is None or page.token:
            if page is not None:
                options["ContinuationToken"] = page.token
                logger.info("%s: %d shards so far", redact(pattern), len(urls))
            page = self._page(bucket, prefix, self._config.attempts, options)
            base = root[: len(root) - len(prefix)]
            names = [key for key, _ in page.keys if not key.endswith("/")]  # no "directories"
            urls += [f"{base}{key}" for key in names if wanted(key.removeprefix(prefix))]
        return urls

    def _other_matches(self, pattern: str) -> list[str]:
        root, wanted, deep = _split(pattern)
        directory = root[: root.rfind("/") + 1] or "./"
        url = parse_url(directory, endpoint=None, allow_schemes=self._config.allow_schemes)
        refuse_local(url, self._config)  # before a whole disk is listed for nothing
        origin = FsspecOrigin(
            url.scheme, scheme_options(self._config, url.scheme), timeout=self._config.timeout
        )
        names = self._retried(
            redact(pattern), self._config.attempts, lambda: origin.names_below(url, deep=deep)
        )
        # The user's own spelling stays in front: it is part of the identity.
        rest = root[root.rfind("/") + 1 :]
        base = root[: len(root) - len(rest)]
        return sorted(
            f"{base}{name}"
            for name in names
            if name.startswith(rest) and wanted(name.removeprefix(rest))
        )

    def sizes(self, shards: Sequence[ShardURL], *, seconds: float | None = None) -> dict[str, int]:
        """Sizes of those S3 and local shards whose size is cheap to learn, by key.

        Costs about one request per thousand shards, and is bounded; a listing that
        is forbidden or fails leaves sizes unknown and raises nothing.

        Args:
            shards: which.
            seconds: about how long it may take.
        """
        if seconds is not None:
            self._patience = min(self._patience, max(_LEAST_PATIENCE, seconds))
            self._end = SYSTEM_CLOCK.monotonic() + seconds
        sizes: dict[str, int] = {}
        groups: dict[tuple[str, str], dict[str, str]] = {}
        remote = [s for s in shards if s.scheme == "s3" and s.version_id is None]
        names = {s.key: s.bucket_and_key() for s in remote}
        directories = {(bucket, name.rpartition("/")[0]) for bucket, name in names.values()}
        for key, (bucket, name) in names.items():
            directory = name.rpartition("/")[0] if len(directories) <= _MANY_DIRECTORIES else ""
            groups.setdefault((bucket, directory), {})[name] = key
        pages = iter(range(_SPARE_PAGES + len(remote) // _PAGE))
        for (bucket, _), wanted in groups.items():
            try:
                for name, size in self._listed(bucket, sorted(wanted), pages):
                    if name in wanted:
                        sizes[wanted[name]] = size
            except ShardCacheError as exn:
                logger.info("sizes in s3://%s are not known beforehand: %s", bucket, exn)
                if isinstance(exn, TransferError):
                    break  # it would be as silent for the next bucket, and cost as long
        for shard in shards:
            if shard.is_local:
                with contextlib.suppress(OSError):  # the fetch will say what is wrong with it
                    sizes[shard.key] = shard.local_path.stat().st_size
        return sizes

    def _listed(
        self, bucket: str, names: Sequence[str], pages: Iterator[int]
    ) -> Iterator[tuple[str, int]]:
        """(name, size) of all ``names`` that exist and of what lies between them."""
        # Characters, not parts of a path, are what S3 compares.
        prefix = os.path.commonprefix([names[0], names[-1]])  # noqa: RUF071
        last = ""
        for name in names:
            if name <= last:
                continue
            if next(pages, None) is None or SYSTEM_CLOCK.monotonic() > self._end:
                logger.info("s3://%s/%s: listing it for sizes takes too long", bucket, prefix)
                return
            # StartAfter is exclusive and may name what does not exist: jump over
            # all that lies before the next wanted name.
            page = self._page(bucket, prefix, 1, {"StartAfter": max(last, name[:-1])})
            yield from page.keys
            if not page.token:
                return
            last = page.keys[-1][0] if page.keys else ""

    def _page(self, bucket: str, prefix: str, attempts: int, options: dict[str, str]) -> _Page:
        where = f"s3://{bucket}/{prefix}"
        url = ShardURL(where, "s3", where, "", "")
        if self._s3 is None:
            config = self._config
            self._s3 = S3Origin(
                scheme_options(config, "s3"),
                endpoint_url=config.endpoint_url,
                connections=1,
                timeout=self._patience,
            )
        origin = self._s3
        try:
            answer = self._retried(
                where, attempts, lambda: origin.list_page(url, MaxKeys=_PAGE, **options)
            )
        except AccessDeniedError as exn:
            raise AccessDeniedError(
                f"{exn.message} Listing needs s3:ListBucket; names in braces, such as "
                "train-{000..127}.tar, need no listing.",
                url=where,
            ) from exn
        keys = [(str(c["Key"]), int(c["Size"])) for c in answer.get("Contents") or []]
        return _Page(keys, str(answer.get("NextContinuationToken") or ""))

    def _retried(self, what: str, attempts: int, function: Callable[[], T]) -> T:
        policy = RetryPolicy(attempts, self._config.deadline, SYSTEM_CLOCK)
        return policy.started(what).call(function, sleep=SYSTEM_CLOCK.sleep)


def _split(pattern: str) -> tuple[str, Callable[[str], bool], bool]:
    """(what all matches begin with, a test of the rest, whether it spans directories)."""
    found = _WILDCARD.search(pattern)
    if found is None:
        return pattern, lambda rest: _SHARD.search(rest) is not None, True
    root, rest = pattern[: found.start()], pattern[found.start() :]
    if rest.endswith("/"):
        rest += "**"
    regex = re.compile(_regex(rest), re.DOTALL)
    shards_only = pattern.endswith("/")

    def wanted(name: str) -> bool:
        return regex.fullmatch(name) is not None and (
            not shards_only or _SHARD.search(name) is not None
        )

    return root, wanted, "/" in rest or "**" in rest


def _regex(glob: str) -> str:
    text = ""
    for piece in re.split(r"(\*\*/?|\*|\?)", glob):
        match piece:
            case "**":
                text += ".*"
            case "**/":
                text += "(?:.*/)?"
            case "*":
                text += "[^/]*"
            case "?":
                text += "[^/]"
            case _:
                text += re.escape(piece)
    return text


@dataclass(frozen=True, slots=True)
class _Page:
    """One answer of ListObjectsV2: its keys with their sizes, and what asks for the next one."""

    keys: list[tuple[str, int]]
    token: str

"""Resolve shard specifications, and find out the sizes of many shards with few requests.

A specification is text with URLs, ``{braces}``, wildcards and prefixes. The sizes serve only for
planning: each download determines the size of its shard again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from shardcache import clock
from shardcache.config import Config
from shardcache.errors import AccessDeniedError, ConfigError, ShardCacheError, ShardNotFoundError
from shardcache.faults import ignoring
from shardcache.origins.resolve import Origins
from shardcache.origins.retry import RetryLimits
from shardcache.urls import (
    CREDENTIAL,
    ShardURL,
    advise_name,
    find_scheme,
    parse_url,
    refuse_in_place,
    shown_url,
)

logger = logging.getLogger(__name__)

#: Matches the names of shards below a prefix, but not their sidecars (.tar.idx, .json, .md5).
SHARD = re.compile(r"\.(tar|tgz|tar\.(gz|bz2|xz|zst|lz4))\Z", re.IGNORECASE)
#: A question mark before ``name=`` begins a query (``?versionId=``) and is not a wildcard.
_WILDCARD = re.compile(r"\*|\?(?![A-Za-z][A-Za-z0-9_.-]*=)")
_QUERY = re.compile(r"\?(?=[A-Za-z][A-Za-z0-9_.-]*=)")
_VERSION = re.compile(r"\?versionId=[^&?]+\Z")
_GLOB = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
#: Separates the parts of a specification. The ARN of a multi-region access point also has ``::``.
_SEPARATOR = r"::(?![0-9]{12}:accesspoint)"
_SPECIAL = re.compile(r"::|[{}$\\]")  # a specification without any of these is one URL
_VARIABLE = re.compile(r"\$\{(\w+)\}")
_NO_RANGE = re.compile(r"(?<!\\)\{([0-9]+)(?:-|\.|\.{3,})([0-9]+)\}")
#: `Listing.sizes` sends at most one request per this many shards, and this many more, because their
#: folders may also hold other objects. With this limit, it gives up within seconds.
_PER_PAGE, _SPARE_PAGES = 1000, 64
#: Seconds without a byte before a listing fails. Short, because sizes only improve a plan.
_TIMEOUT = 10.0


def is_pattern(url: str) -> bool:
    """Return whether ``url`` is a prefix (ends with ``/``) or has a wildcard (``*`` or ``?``)."""
    scheme = url.partition(":")[0].lower()
    if scheme == "pipe":
        return False
    if find_scheme(scheme).is_web:  # "?" begins a query; a final "/" does not make a prefix
        return "*" in url.partition("?")[0]
    return url.endswith("/") or _WILDCARD.search(url) is not None


def expand_braces(spec: str) -> Iterator[str]:
    """Yield the URLs, patterns and prefixes of a specification, in order.

    The rules are WebDataset's: split at ``::``, replace ``${X}`` by the environment variable
    ``WDS_X``, and expand braces. Importing WebDataset's own function would import torch. Raises
    ConfigError if the specification is malformed, or a variable is not set.
    """
    if _SPECIAL.search(spec) is None:  # saves much time in long lists
        yield spec
        return
    import braceexpand

    for part in re.split(_SEPARATOR, spec):
        for _ in range(10):  # nested variables, as deep as WebDataset goes
            part = _VARIABLE.sub(_variable, part)
        if wrong := _NO_RANGE.search(part):
            start, end = wrong.groups()
            raise ConfigError(f"{shown_url(part)}: write {wrong[0]} as {{{start}..{end}}}.")
        urls = None
        with contextlib.suppress(braceexpand.UnbalancedBracesError):  # type: ignore[attr-defined]
            urls = list(braceexpand.braceexpand(part))
        if urls is None:  # not in a handler: the exception quotes the text
            raise ConfigError(
                f"{shown_url(part)}: unbalanced braces. Write ranges as {{0000..0127}}, lists as "
                "{a,b}, and a brace of the name itself as \\{."
            )
        yield from urls


def _variable(match: re.Match[str]) -> str:
    value = os.environ.get(name := f"WDS_{match[1]}")
    if re.search(CREDENTIAL, name):
        return f"${name}"  # only the header of a command (`read_command`) may contain the value
    if value is None:
        raise ConfigError(f"{match[0]} in a shard specification needs {name}: set it.")
    return value


def spec_list(specs: str | ShardURL | Iterable[str | ShardURL]) -> list[str | ShardURL]:
    """Return one shard specification, or several, as a list. Raises ConfigError for other types."""
    listed = [specs] if isinstance(specs, str | ShardURL) else specs
    listed = list(listed) if isinstance(listed, Iterable) else [listed]
    if wrong := [spec for spec in listed if not isinstance(spec, str | ShardURL)]:
        raise ConfigError(f"shards are a URL or a list of URLs, not {type(wrong[0]).__name__}.")
    return listed


class Selection:
    """The shards that a specification selects from a set of known URLs, such as cached ones.

    A part of the specification without a slash is compared with the last component of each URL. A
    `ShardURL` in place of the specification selects only itself.
    """

    text: str  # the specification without secrets
    named: dict[str, ShardURL]  # the shards that the specification names in full, by canonical URL
    patterns: Sequence[Callable[[str], bool]] = ()  # tests of canonical URLs

    def __init__(self, spec: str | ShardURL, parse: Callable[[str], ShardURL]) -> None:
        if isinstance(spec, ShardURL):
            self.text, self.named = str(spec), {str(spec): spec}
            return
        self.text = shown_url(spec)
        parts = list(expand_braces(spec))
        self.patterns = [_test(part, parse) for part in parts if _is_choice(part)]
        self.named = {str(s): s for s in (parse(part) for part in parts if not _is_choice(part))}

    def __contains__(self, url: str) -> bool:
        return url in self.named or any(matches(url) for matches in self.patterns)


def _is_choice(part: str) -> bool:
    """Return whether a part of a specification is a pattern, a prefix or a bare file name."""
    scheme, colon, _ = part.partition(":")
    is_basename = bool(part) and not colon and "/" not in part
    return scheme != "pipe" and (is_basename or part.endswith("/") or is_pattern(part))


def _test(pattern: str, parse: Callable[[str], ShardURL]) -> Callable[[str], bool]:
    """Return a function that says whether a canonical URL, without its query, matches a pattern."""
    root, wanted, _ = _split(pattern)
    whole = "/" in pattern
    if whole:  # spell the prefix in the canonical way, like the URLs
        root = str(parse(f"{root}x"))[:-1]

    def matches(url: str) -> bool:
        # In S3 URLs, a question mark not followed by versionId= belongs to the object's name.
        query = _VERSION if url.startswith("s3://") else _QUERY
        name = query.split(url, maxsplit=1)[0]
        name = name if whole else name.rpartition("/")[2]
        return name.startswith(root) and wanted(name.removeprefix(root))

    return matches


class Listing:
    """Lists the origins of one configuration. Not thread-safe, and not to be used after a fork."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._retry_limits = RetryLimits(config.attempts, config.deadline, config.patience)
        self._origins = Origins(config.replace(timeout=min(config.timeout, _TIMEOUT)))
        self._sizes: dict[str, int] = {}  # by canonical URL

    def expand(self, spec: str) -> Iterator[str]:
        """Yield the URLs of a specification, in order."""
        for url in expand_braces(spec):
            yield from self.matches(url) if is_pattern(url) else [url]

    def matches(self, pattern: str) -> list[str]:
        """Return the URLs of the shards that match a pattern or prefix, in lexical order.

        ``*`` and ``?`` match within one component of the path, and ``**`` across components. A
        pattern that ends with ``/`` matches all tar files below it.

        Raises:
            ShardNotFoundError: no shard matches.
            AccessDeniedError, ConfigError, TransferError: the origin cannot be listed.
        """
        schemes = self._config.allow_schemes
        parse_url(f"{pattern}x", allow_schemes=schemes)  # refuses two patterns
        root, wanted, deep = _split(pattern)
        # The prefix stays exactly as the user wrote it, because it is part of the shards' identity.
        base, slash, rest = root.rpartition("/")
        if base.endswith(":/"):
            raise ConfigError(f"{shown_url(pattern)}: a bucket's name has to be given in full")
        file = parse_url(f"{base}{slash}x", allow_schemes=schemes)
        directory = replace(file, raw=base + slash or "./", canonical=str(file)[:-1], key="")
        if deep:
            refuse_in_place(directory, self._config.cache_local)  # instead of listing a whole disk
        pages = self._pages(directory, rest, deep)
        # A folder may be an object of its own, whose name in it is empty.
        names = [name for page in pages for name in page if name and not name.endswith("/")]
        urls = [
            f"{base}{slash}{name}"
            for name in sorted(names)
            if name.startswith(rest) and wanted(name.removeprefix(rest))
        ]
        if not urls:
            what = "no shards below it" if pattern.endswith("/") else "nothing matches"
            raise ShardNotFoundError(
                f"{shown_url(pattern)}: {what}. Check the spelling and the endpoint."
                f"{advise_name(pattern)}",
                url=shown_url(pattern),
            )
        return urls

    def _pages(
        self, directory: ShardURL, prefix: str, deep: bool = True, *, once: bool = False
    ) -> Iterator[list[str]]:
        """Yield the names of the files in a directory, page by page, and remember their sizes."""
        origin, token, tokens = self._origins.of(directory), "", set[str]()
        while True:
            retries = self._retry_limits.started(str(directory), once=once)
            page = partial(origin.list_page, directory, prefix, token, deep=deep)
            try:
                sizes, token = retries.call(page, sleep=clock.sleep)
            except AccessDeniedError as exn:
                raise AccessDeniedError(
                    f"{exn.message} Listing needs more rights, such as s3:ListBucket; names in "
                    "braces, such as train-{000..127}.tar, need no listing.",
                    url=str(directory),
                ) from exn
            known = ((name, size) for name, size in sizes.items() if size is not None)
            self._sizes |= {f"{directory}{name}": size for name, size in known}
            yield list(sizes)
            if not token:
                return
            if token in tokens:
                text = f"{directory}: the store repeats a page of the listing. Check endpoint_url."
                raise ConfigError(text, url=str(directory))
            tokens.add(token)

    def sizes(
        self, shards: Sequence[ShardURL], level: int = logging.INFO, *, ask: bool = True
    ) -> dict[str, int]:
        """Return the sizes of shards by key, as far as listings and local files reveal them.

        S3 takes about one request per thousand objects in the folders of the shards, up to a limit.
        If a listing fails or is forbidden, the remaining sizes are missing from the result; the
        reason is logged at ``level``. With WARNING, a failure is raised. This sends no request
        without ``ask``.
        """
        keys = {str(shard): shard.key for shard in shards if not shard.options}
        folders: dict[ShardURL, list[str]] = {}
        for shard in sorted(shards, key=str):
            url = str(shard)
            if url in keys and shard.version_id is None and url not in self._sizes:
                folder = url.rpartition("/")[0] + "/"
                directory = ShardURL(folder, shard.scheme, folder, "", "")
                folders.setdefault(directory, []).append(url)
        left = _SPARE_PAGES + len(shards) // _PER_PAGE if ask else 0
        try:
            for directory, urls in folders.items():
                if left <= 0 or directory.is_masked or not self._origins.of(directory).lists_pages:
                    continue
                first, last = (url.removeprefix(str(directory)) for url in (urls[0], urls[-1]))
                # A prefix consists of characters, not of path components.
                prefix = os.path.commonprefix([first, last])  # noqa: RUF071
                for page in self._pages(directory, prefix, once=True):
                    left -= 1
                    if left <= 0 or (page and page[-1] >= last):
                        break
        except ShardCacheError as exn:  # the next folder would fail as well
            if level >= logging.WARNING and not isinstance(exn, AccessDeniedError):
                raise  # a plan alone must not hide that nothing could be downloaded
            logger.log(level, "planning without the sizes of shards: %s", exn)
        sizes = {key: self._sizes[url] for url, key in keys.items() if url in self._sizes}
        for shard in shards:
            if shard.is_local:
                with ignoring(OSError):  # the download reports the error
                    sizes[shard.key] = shard.local_path.stat().st_size
        return sizes


def _split(pattern: str) -> tuple[str, Callable[[str], bool], bool]:
    """Return a pattern's literal prefix, a test of the rest, and whether `/` may be in the rest."""
    wildcard = _WILDCARD.search(pattern)
    if wildcard is None:
        is_prefix = pattern.endswith("/")
        return pattern, lambda rest: bool(SHARD.search(rest) if is_prefix else not rest), is_prefix
    root, glob = pattern[: wildcard.start()], pattern[wildcard.start() :]
    if shards_only := glob.endswith("/"):
        glob += "**"
    pieces = re.split(r"(\*\*/?|\*|\?)", glob)
    regex = re.compile("".join(_GLOB.get(p) or re.escape(p) for p in pieces), re.DOTALL)

    def wanted(name: str) -> bool:
        return bool(regex.fullmatch(name) and (not shards_only or SHARD.search(name)))

    return root, wanted, "/" in glob or "**" in glob

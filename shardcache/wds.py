"""Make WebDataset read shards through a cache, and read tar archives in less time.

`attach` replaces stages of a pipeline, and changes no global state.

`register` replaces WebDataset's ``gopen``, for pipelines that cannot be changed. Only shards are
read through the cache: files that WebDataset's own readers of archives open, and files that are
named like archives. Other calls, such as writes and reads of local files, go to the original
function. So do shards that only WebDataset may be able to read: commands for a shell, and ``gs://``
URLs without gcsfs or without its credentials. If WebDataset has no function for a scheme, as for
``s3``, files that are not shards, such as timm's ``_info.json``, are read and not stored.
"""

from __future__ import annotations

import inspect
import logging
import multiprocessing
import os
import pickle
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from shardcache.archive import MALFORMED, REPEATED, TarWalk, is_meta, key_and_field
from shardcache.cache import Cache, default_cache
from shardcache.errors import AccessDeniedError, ConfigError, ShardCacheError
from shardcache.faults import ignoring
from shardcache.locks.mounts import LOCAL_TYPES, mount_of
from shardcache.origins.listing import SHARD, Listing, is_pattern
from shardcache.ranks import HALF_STATED, LAUNCHERS, detect, is_half_stated, run_of_this_process
from shardcache.reading.lookahead import Lookahead
from shardcache.reading.stream import stream_file
from shardcache.urls import ShardURL, find_scheme, shown_url

if TYPE_CHECKING:
    from shardcache.cache import Handler

__all__ = ["attach", "register", "tar_files", "tar_samples", "url_opener"]

logger = logging.getLogger(__name__)

_Pipeline = TypeVar("_Pipeline")
_Gopen = Callable[..., Any]
#: Generators of WebDataset that yield the URLs of a list.
_LISTS = "SimpleShardList.__iter__", "ResampledShards.__iter__", "MultiShardSample.__iter__"
#: The modules of WebDataset that call ``gopen`` for archives, and only for archives.
_READERS = frozenset({"webdataset.cache", "webdataset.tariterators"})
_TWICE = (
    "the pipeline also keeps each shard in WebDataset's cache_dir, so the node stores all shards "
    "twice. Remove cache_dir, or call cache.attach(dataset), which replaces it."
)
#: Kinds of messages that this process, or its parent before the fork, has logged. They are logged
#: because many users pass handlers that silently skip errors.
_logged: set[str] = set()


def url_opener(
    data: Iterable[Any], handler: Handler | None = None, *, cache: Cache, **_gopen_options: Any
) -> Iterator[dict[str, Any]]:
    """Open the shards of a pipeline. This stage replaces WebDataset's stage of the same name.

    The next shards are downloaded ahead if ``data`` comes from a list, also behind generators that
    shuffle or split it. Other sources, such as a queue, may count an item as read once it is taken.

    Args:
        data: dicts with the key ``url``, or plain URLs.
        handler: called with the exception if a shard cannot be opened; the URL is appended to the
            exception's ``args``. It returns True to continue with the next shard, or False to stop.
            The default raises the exception.
        cache: the cache to read through.
        **_gopen_options: ignored; WebDataset's function takes options for its pipes.

    Yields:
        The same dicts, with ``stream``, which the consumer may close, and ``local_path``: the path
        of the cached shard, or its URL, because all samples of a batch need the same fields.
    """

    _warn_of_ranks(cache)
    ahead = Lookahead(cache.process, data, partial(shard_of, cache), prefetch=_is_list(data))
    opened, failed, first = 0, 0, None
    for item in ahead:
        sample: dict[str, Any] = item if isinstance(item, dict) else {"url": item}
        try:
            stream = ahead.open()
        except Exception as exn:  # noqa: BLE001 - the handler decides, as in WebDataset
            exn.args = (*exn.args, shown_url(str(sample["url"])))
            is_handled = (handler or reraise)(exn)
            log_once(exn, str(sample["url"]), cache)
            failed, first = failed + 1, first or str(exn)
            if is_handled:
                exn.__traceback__ = None  # in a cycle, its frames would keep shards in use
                continue
            break
        opened += 1
        sample |= {"stream": stream, "local_path": stream.name.removeprefix("file://")}
        yield sample
        # Without this, the references would keep the shard in use while the next one is downloaded.
        del stream, sample, item
    cache.process.counters.flush()  # the epoch ends; a persistent worker may not write for long
    if failed and not opened:
        logger.error("none of %d shards could be opened; the first error: %s", failed, first)


def _is_list(data: Any) -> bool:
    """Return whether items can be taken ahead: those of a list, also behind other stages."""
    while inspect.isgenerator(data) and data.gi_frame is not None:
        if data.__qualname__ in _LISTS:
            return True
        names = data.gi_code.co_varnames[: data.gi_code.co_argcount]
        values = map(data.gi_frame.f_locals.get, names)
        data = next((value for value in values if isinstance(value, Iterator)), None)
    return isinstance(data, list | tuple | type(iter([])))


def shard_of(cache: Cache, item: Any) -> ShardURL:
    """Return the shard that WebDataset reads for an item of a pipeline, as GOPEN_REWRITE says.

    Raises ConfigError for one that WDS_SECURE forbids, or whose URL is not valid.
    """
    from webdataset.gopen import rewrite_url

    url = rewrite_url(item["url"] if isinstance(item, dict) else item)
    shard = cache.parse(url)
    if _is_forbidden(url, shard):
        raise ConfigError(f"{shard}: WDS_SECURE forbids local files and commands.", url=str(shard))
    if _has_function(url) and is_new(f"gopen {shard.scheme}", cache):
        text = (
            "WebDataset's gopen_schemes names a function for %s://, which the cache does not call"
        )
        logger.warning(text, shard.scheme)
    return shard


def _has_function(url: str) -> bool:
    """Return whether this program has told WebDataset to open URLs of this scheme in its way."""
    from webdataset import gopen_schemes

    scheme = url.partition(":")[0]
    function = gopen_schemes.get(scheme)
    is_usual = getattr(function, "__module__", None) in ("webdataset.gopen", __name__)
    is_ais = getattr(function, "__name__", "") == "gopen_ais" and scheme != "ais"  # USE_AIS_FOR
    return function is not None and (is_ais or not is_usual)


def _is_forbidden(url: str, shard: ShardURL) -> bool:
    """Return whether the ``gopen`` of WebDataset 1.0 refuses a shard, as WDS_SECURE demands."""
    from webdataset import utils

    is_secure = getattr(utils, "enforce_security", False)
    return is_secure and (shard.is_local or url.startswith("pipe:"))


def reraise(exn: Exception) -> bool:
    """Raise the exception: the default handler."""
    raise exn


def tar_files(
    data: Iterable[dict[str, Any]],
    handler: Handler = reraise,
    select_files: Callable[[str], bool] | None = None,
    rename_files: Callable[[str], str] | None = None,
    eof_value: Any = ...,
) -> Iterator[Any]:
    """Expand opened shards into files. This stage replaces WebDataset's ``tar_file_expander``.

    Args:
        data: ``dict(url=..., stream=...)`` for each shard, optionally with ``local_path``.
        handler: called with the exception if a member or an archive cannot be read. It returns True
            to continue with the next one, or False to stop. The default raises the exception.
        select_files: called with a file's name; returns whether to yield the file.
        rename_files: called with a file's name before ``select_files``; returns the new name.
        eof_value: yielded after each shard, unless it is None. The default is that of the installed
            WebDataset: ``{}``, or None before version 1.0.

    Yields:
        ``dict(fname=..., data=..., __url__=...)``, with ``__local_path__`` if the shard has one.
    """
    if eof_value is ...:
        from webdataset.tariterators import tar_file_expander

        parameters = inspect.signature(tar_file_expander).parameters
        eof_value = {} if "eof_value" in parameters else None
    for source in data:
        url, local_path, stream, walk = source["url"], source.get("local_path"), None, None
        shard = {"__url__": url} | ({} if local_path is None else {"__local_path__": local_path})
        try:
            stream = source["stream"]
            walk = TarWalk(stream)
            for name in walk:
                try:
                    if name[:2] == "__" and is_meta(name):
                        continue
                    if rename_files:
                        name = rename_files(name)
                    if select_files is not None and not select_files(name):
                        continue
                    sample = {"fname": name, "data": walk.read(), **shard}
                except Exception as exn:  # noqa: BLE001 - the handler decides
                    if hasattr(exn, "args") and len(exn.args) > 0:
                        exn.args = (f"{exn.args[0]!s} @ {stream!s}", *exn.args[1:])
                    if handler(exn):
                        continue
                    break
                yield sample
            else:
                _warn_of_rest(walk, str(url))
            if eof_value is not None:
                yield eof_value
        except Exception as exn:  # noqa: BLE001 - the handler decides
            exn.args = (*exn.args, source.get("stream"), shown_url(str(source.get("url"))))
            if not handler(exn):
                return
        del source, stream, walk  # they would keep the shard in use while the next one is opened


def _warn_of_rest(walk: TarWalk, url: str) -> None:
    """Log, once per shard, that readers miss data behind an end marker."""
    with ignoring(ShardCacheError, OSError):  # all files that readers see have been read
        if (problem := walk.problem()) and is_new(f"rest {shown_url(url)}"):
            logger.warning(MALFORMED, shown_url(url), problem)


def group_files(
    data: Iterable[dict[str, Any]], handler: Handler = reraise
) -> Iterator[dict[str, Any]]:
    """Group files into samples, as WebDataset's ``group_by_keys`` with its defaults does."""
    sample: dict[str, Any] = {}
    shard, seen = None, set[str]()  # its keys
    for file in data:
        try:
            if not file:  # the end of a shard
                if sample and not sample.get("__bad__"):
                    yield sample
                sample, shard = {}, None
                continue
            name = file["fname"]
            key, field = key_and_field(name)
            if key is None:
                continue
            field = field.lower()
            if not sample or key != sample["__key__"]:
                if sample and not sample.get("__bad__"):
                    yield sample
                sample = {"__key__": key, "__url__": file["__url__"]}
                if shard != sample["__url__"]:  # WebDataset before 1.0 does not mark the ends
                    shard = sample["__url__"]
                    seen.clear()
                if key in seen:
                    url = shown_url(str(shard))
                    if is_new(f"again {url}"):
                        logger.warning(MALFORMED, url, REPEATED.format(ascii(key)[1:-1]))
                seen.add(key)
            if field in sample:
                raise ValueError(f"{name}: duplicate file name in tar file {field} {sample.keys()}")
            sample[field] = file["data"]
            if "__local_path__" in file:
                sample["__local_path__"] = file["__local_path__"]
        except Exception as exn:  # noqa: BLE001 - the handler decides
            exn.args = (*exn.args, file.get("stream"), file.get("url"))
            if not handler(exn):
                break
    if sample and not sample.get("__bad__"):
        yield sample


def tar_samples(
    data: Iterable[dict[str, Any]],
    handler: Handler = reraise,
    select_files: Callable[[str], bool] | None = None,
    rename_files: Callable[[str], str] | None = None,
) -> Iterator[dict[str, Any]]:
    """Expand opened shards into samples: `tar_files`, then `group_files`."""
    return group_files(tar_files(data, handler, select_files, rename_files, {}), handler)


def attach(
    dataset: _Pipeline, cache: Cache, *, fast_tar: bool = True, is_reseeded: bool = False
) -> _Pipeline:
    """Make a pipeline read its shards through ``cache``, and return the pipeline itself.

    Replaces the stage that opens URLs, and keeps its handler. A second call replaces the cache. In
    a list of shards, prefixes and names with ``*`` are replaced by the shards that they match. Logs
    a warning, once per job, if the shards have the same order in every epoch, are fewer than their
    readers, or lie on a network filesystem, where they are not cached.

    Args:
        dataset: a ``WebDataset`` or any ``DataPipeline``.
        cache: the cache to read through.
        fast_tar: whether to replace WebDataset's ``tar_file_expander`` and ``group_by_keys`` by
            `tar_files` and `group_files`, which yield the same in less time.
        is_reseeded: whether the caller shuffles the shards in another order in every epoch.

    Raises:
        ConfigError: ``dataset`` has no stage that opens URLs.
        ShardNotFoundError, AccessDeniedError, TransferError: a pattern cannot be expanded.
    """
    from webdataset import filters, shardlists

    pipeline = getattr(dataset, "pipeline", None)
    if not isinstance(pipeline, list):
        raise ConfigError(
            f"attach() takes a WebDataset or a DataPipeline, not {type(dataset).__name__}."
        )
    stages = [new_stage for stage in pipeline for new_stage in _replaced(stage, cache, fast_tar)]
    functions = [_call_of(stage)[0] for stage in stages]
    if url_opener not in functions:
        names = ", ".join(getattr(stage, "__name__", type(stage).__name__) for stage in pipeline)
        raise ConfigError(
            f"no stage of this pipeline opens URLs ({names}). Call attach() with the WebDataset "
            "itself, or use cache.url_opener as the stage that opens the shards."
        )
    if not is_reseeded:
        _warn_of_order(stages, cache)
    urls = getattr(stages[0], "urls", None)
    urls = [url for url in urls if isinstance(url, str)] if isinstance(urls, list) else []
    patterns = {url for url in urls if is_pattern(url) and ("*" in url or url.endswith("/"))}
    if patterns:
        listing = Listing(cache.config)
        groups = [listing.matches(url) if url in patterns else [url] for url in urls]
        stages[0].urls = urls = [url for group in groups for url in group]
    if not cache.config.cache_local:
        _warn_of_mounts(urls, cache)
    if type(stages[0]) is shardlists.SimpleShardList:  # others may be endless
        before = stages[1 : functions.index(url_opener)]
        check = _check_readers, len(urls), before, is_reseeded, cache
        stages.insert(1, filters.FilterFunction(*check))
    pipeline[:] = stages
    cache.prepare(urls[0] if urls else None)
    return dataset


def _replaced(stage: Any, cache: Cache, fast_tar: bool) -> list[Any]:
    """Return the stages that replace a stage that opens URLs or, with ``fast_tar``, archives."""
    from webdataset import cache as caches
    from webdataset import filters, tariterators

    opens, is_combined = _opens(stage)
    expander = tar_files if fast_tar else tariterators.tar_file_expander
    group = group_files if fast_tar else tariterators.group_by_keys
    function, args, options = _call_of(stage)
    if function is tariterators.tar_file_expander:
        return [filters.FilterFunction(expander, *args, **options)]
    if function is tariterators.group_by_keys and not args and {*options} <= {"handler"}:
        return [filters.FilterFunction(group, **options)]
    if function is _check_readers:
        return []
    if not opens:
        return [stage]
    handler = options.get("handler", next(iter(args), getattr(stage, "handler", None)))
    stages = [filters.FilterFunction(url_opener, handler=handler, cache=cache)]
    if getattr(stage, "validator", None) not in (None, getattr(caches, "check_tar_format", None)):
        logger.warning("the validator of FileCache is not called: pass it as the option validate")
    if is_combined:
        names = "handler", "select_files", "rename_files"
        kept = {name: options[name] for name in names if name in options}
        stages += [
            filters.FilterFunction(expander, *args, **kept),
            filters.FilterFunction(group, handler=handler or reraise),
        ]
    return stages


def _opens(stage: Any) -> tuple[bool, bool]:
    """Return whether a stage opens URLs, and whether it also expands and groups."""
    from webdataset import cache, tariterators

    # WebDataset 1.0 has these classes, and earlier versions have the function.
    openers = getattr(cache, "StreamingOpen", None), getattr(cache, "FileCache", None)
    combined = tariterators.tarfile_samples, getattr(cache, "cached_tarfile_samples", None)
    function = _call_of(stage)[0]
    is_opener = type(stage) in openers or function in (url_opener, tariterators.url_opener)
    return is_opener or function in combined, function in combined


def _warn_of_order(stages: list[Any], cache: Cache) -> None:
    """Log, once per job, that the shards are sure to have one shuffled order in all epochs."""
    from webdataset import filters, shardlists

    splits = shardlists.split_by_node, shardlists.split_by_worker, shardlists.single_node_only
    seeded = False
    for stage in stages:
        function, args, options = _call_of(stage)
        if _opens(stage)[0]:
            break
        if type(stage) is shardlists.SimpleShardList:
            seeded = stage.seed is not None
        elif function is filters.shuffle.f and options.get("seed") is not None:
            size = args[0] if args else options.get("bufsize", 1000)
            seeded = seeded or size > 1  # WebDataset(shardshuffle=False) has a shuffle of size 0
        elif function not in splits:
            return  # an unknown stage may change the order
    if seeded and is_new("order", cache):
        logger.warning(
            "every epoch will have the same order of shards, because this pipeline shuffles them "
            "with a fixed seed. WebDataset(shardshuffle=...) does so since version 0.2.109. For a "
            "new order in every epoch, write wds.DataPipeline(wds.SimpleShardList(urls), "
            "wds.split_by_node, wds.split_by_worker, wds.shuffle(100), wds.tarfile_to_samples())."
        )


def _warn_of_mounts(urls: list[str], cache: Cache) -> None:
    """Log, once per job, that the shards on a network filesystem are not cached."""
    paths = (re.sub("^file:(//)?", "", url) for url in urls if re.match("file:|[^:]*$", url))
    for mount in map(mount_of, {*map(os.path.dirname, paths)}):
        if mount is not None and mount.type not in LOCAL_TYPES and is_new("mount", cache):
            text = "shards on %s (%s) are read in place, not cached: set cache_local to cache them"
            logger.warning(text, mount.point, mount.type)


def _check_readers(
    data: Any, shards: int, before: list[Any], is_reseeded: bool, cache: Cache
) -> Any:
    """Log, once per job, that ranks and workers do not share the shards of a pipeline. A stage."""
    from webdataset import filters, shardlists
    from webdataset.utils import pytorch_worker_info  # which splits the shards as well

    _, ranks, _, workers = pytorch_worker_info()
    splits = shardlists.split_by_node, shardlists.split_by_worker
    functions = [_call_of(stage)[0] for stage in before]  # before the shards are opened
    by_node, by_worker = (split in functions for split in splits)
    known = {*functions} <= {*splits, filters.shuffle.f}  # no splitter of the user's own
    is_shuffled = is_mixed = False
    for function, _, options in map(_call_of, before):
        # Without a seed, each rank and worker draws another order.
        is_shuffled |= function is filters.shuffle.f and options.get("seed") is None
        is_mixed |= is_shuffled and function in splits
    if is_mixed and not is_reseeded and ranks * workers > 1 and is_new("shuffled", cache):
        logger.warning(
            "this pipeline shuffles the shards before it splits them, in another order in each "
            "rank and worker. So some samples are read several times, and others not at all. Put "
            "the shuffle after split_by_node and split_by_worker."
        )
    if known and not by_node and ranks > 1 and is_new("undivided", cache):
        logger.warning(
            "each of the %d ranks reads all shards. Add wds.split_by_node to the pipeline, unless "
            "the list of shards is the part of one rank.",
            ranks,
        )
    if known and not by_worker and workers > 1 and is_new("unsplit", cache):
        logger.warning(
            "each of the %d workers reads all shards of its rank. Add wds.split_by_worker to the "
            "pipeline, after split_by_node.",
            workers,
        )
    readers = (ranks := ranks if by_node else 1) * (workers := workers if by_worker else 1)
    if shards < readers and is_new("readers", cache):
        logger.warning(
            "%d shards are split among %d ranks x %d workers, so %d of %d readers get none. With "
            "DDP, a rank without samples blocks all others. Use more shards or fewer workers.",
            *(shards, ranks, workers, readers - shards, readers),
        )
    return data


def _warn_of_ranks(cache: Cache) -> None:
    """Log, once per job, that WebDataset does not see the ranks of the job."""
    from webdataset.utils import pytorch_worker_info  # which its splitters use

    ranks, seen = detect(), pytorch_worker_info()[1]
    if seen == 1 and is_half_stated() and is_new("half", cache):
        logger.warning(HALF_STATED)
    if ranks.launcher not in LAUNCHERS or seen > 1 or ranks.world_size == 1:
        return
    if is_new("ranks", cache):
        number, size = LAUNCHERS[ranks.launcher][:2]
        logger.warning(
            "this job has %d ranks (%s), but WebDataset sees one, so split_by_node gives all "
            "shards to every rank, which then read the same samples. Add these lines before the "
            "pipeline, unless you split the shards yourself: os.environ.setdefault('RANK', "
            "os.environ['%s']); os.environ.setdefault('WORLD_SIZE', os.environ['%s'])",
            *(ranks.world_size, size, number, size),
        )


def _call_of(stage: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return the function of a stage, and the arguments that follow its input data."""
    if isinstance(stage, partial):
        return stage.func, stage.args, stage.keywords
    return getattr(stage, "f", stage), getattr(stage, "args", ()), getattr(stage, "kw", {})


# -- gopen -------------------------------------------------------------------------


def register(scheme: str, cache: Cache) -> None:
    """Make WebDataset's ``gopen`` read the shards of one scheme, such as ``s3``, through ``cache``.

    Affects this process and the workers that it forks or spawns. Writes, and files that are not tar
    archives, go to the function that was registered for the scheme before.
    """
    if not isinstance(cache, Cache):
        raise ConfigError(f"cache is a Cache, such as Cache({cache!r:.80}).")
    _Registration(scheme, cache)


class _Registration:
    """A scheme that WebDataset reads through a cache, also where this object is unpickled."""

    def __init__(self, scheme: str, cache: Cache) -> None:
        from webdataset import gopen_schemes

        self._arguments = scheme, cache
        original = gopen_schemes.get(scheme)
        original = getattr(original, "original", original)  # a second call replaces the cache
        original = original or _uncached(lambda: cache, gopen_schemes["__default__"])
        gopen_schemes[scheme] = _cached(lambda: cache, original)
        inherited = vars(multiprocessing.current_process())["_config"]  # by spawned children, too
        inherited[f"shardcache {scheme}"] = self

    def __reduce__(self) -> tuple[Any, ...]:
        try:
            pickle.dumps(self._arguments)
        except Exception as exn:  # noqa: BLE001 - of an option; the process may need no shards
            text = "processes that are spawned do not read %s:// through the cache: %s"
            logger.warning(text, self._arguments[0], exn)
            return str, ()
        return _Registration, self._arguments


def read_through_cache(module: Any) -> None:
    """Replace ``gopen`` in ``module``, `webdataset.gopen`, by one that uses the default cache."""
    schemes = module.gopen_schemes
    schemes["__default__"] = _uncached(default_cache, schemes["__default__"])
    module.gopen = _cached(default_cache, module.gopen, module.rewrite_url)


def _cached(
    cache_of: Callable[[], Cache], original: _Gopen, rewrite: Callable[[str], str] = str
) -> _Gopen:
    """Return a ``gopen`` that reads shards through a cache; other calls go to ``original``."""

    def gopen(url: str, mode: str = "rb", bufsize: int = 8192, **options: Any) -> Any:
        module, function = _caller()
        cache, is_archive, is_tried = None, module in _READERS, False
        try:
            if mode == "rb" and url != "-":  # standard input
                cache, rewritten = cache_of(), rewrite(url)
                shard = cache.parse(rewritten)
                is_in_place = cache.process.is_in_place(shard)
                is_other = _is_forbidden(rewritten, shard) or _has_function(rewritten)
                is_named = is_archive or SHARD.search(shard.basename) is not None
                if is_tried := is_named and not (is_in_place or is_other):
                    _warn_of_ranks(cache)
                    _warn_of_order(_stages_of_caller(), cache)
                    if function == "download" and is_new("cache_dir", cache):
                        logger.warning(_TWICE)
                    return cache.open(rewritten)
                if is_archive and is_in_place:
                    _note(url, "it is a local file, which is read in place. Set cache_local.")
        except Exception as exn:
            scheme = find_scheme(url.partition(":")[0])
            has_other = scheme.has_program or not scheme.is_allowed
            if cache is None or not (
                has_other and isinstance(exn, (ConfigError, AccessDeniedError))
            ):
                log_once(exn, url, cache)
                raise
            if is_tried:
                cache.process.counters.add({"left": 1})
            if is_archive:
                _leave(url, str(exn), cache)
        return original(url, mode, bufsize, **options)

    gopen.original = original  # type: ignore[attr-defined]
    return gopen


def _uncached(cache_of: Callable[[], Cache], original: _Gopen) -> _Gopen:
    """Return a ``gopen`` that reads files from their origin, for schemes unknown to WebDataset."""

    def gopen(url: str, mode: str = "rb", bufsize: int = 8192, **options: Any) -> Any:
        if mode == "rb" and find_scheme(url.partition(":")[0]).is_allowed:
            cache = cache_of()
            return stream_file(cache.process, cache.parse(url))
        return original(url, mode, bufsize, **options)

    return gopen


def _caller() -> tuple[str, str]:
    """Return the module and the name of the function that calls ``gopen``."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") == "webdataset.gopen":
        frame = frame.f_back  # WebDataset's `gopen`, which calls what `register` has set
    return frame.f_globals.get("__name__", ""), frame.f_code.co_name


def _stages_of_caller() -> list[Any]:
    """Return the stages of the pipeline that is reading now; none outside of a pipeline."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") != "webdataset.pipeline":
        frame = frame.f_back
    return getattr(frame and frame.f_locals.get("self"), "pipeline", [])


def _leave(url: str, reason: str, cache: Cache) -> None:
    """Log why WebDataset reads a shard, and note it."""
    name = shown_url(url)
    reason = reason.removeprefix(name).lstrip(": ")
    if is_new("left", cache):
        text = "%s is not cached, and WebDataset reads it: %s Further ones are not logged."
        logger.warning(text, name, reason)
    _note(url, reason)


def _note(url: str, reason: str) -> None:
    """Add a shard that is not cached, and the reason, to the file of `shardcache run`."""
    name = shown_url(url)
    if (path := run_of_this_process()[1]) and is_new(f"left {name}"):
        with ignoring(OSError):  # no file: another node, or the command has ended
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
            with open(descriptor, "w", encoding="utf-8", errors="replace") as file:
                file.write("\t".join(" ".join(text.split()) for text in (name, reason)) + "\n")


def log_once(exn: Exception, url: str, cache: Cache | None) -> None:
    """Log an error that a handler may hide; each type of error once per job and node."""
    if not is_new(type(exn).__name__, cache):
        return
    text, name = str(exn).rstrip("."), shown_url(url)
    where = "" if name in text else f"{name}: "
    note = "If a handler ignores errors, it skips such shards; further ones are not logged."
    logger.error("%s%s. %s", where, text, note)


def is_new(kind: str, cache: Cache | None = None) -> bool:
    """Return True once per kind of message and process; with a cache, per job and node."""
    if kind in _logged:
        return False
    _logged.add(kind)
    return cache is None or cache.process.notices.is_new(kind)

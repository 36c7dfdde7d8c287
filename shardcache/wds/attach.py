"""Connect WebDataset pipelines to a cache: `attach`, and the stages that it puts into them.

A WebDataset pipeline is a list of stages. `attach` replaces stages in this list and changes no
global state, so it works whether workers are started by fork, spawn or forkserver.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from shardcache.archive import MALFORMED, REPEATED, TarWalk, is_meta, split
from shardcache.errors import ConfigError
from shardcache.locks.mounts import mount_of
from shardcache.reading.lookahead import Lookahead
from shardcache.urls import ShardURL, shown_url
from shardcache.wds.gopen import is_new, log_once

if TYPE_CHECKING:
    from shardcache.cache import Cache, Handler

logger = logging.getLogger(__name__)

_Pipeline = TypeVar("_Pipeline")
#: The arguments of WebDataset's ``tar_file_expander``.
_EXPANDER_OPTIONS = ("handler", "select_files", "rename_files")


def url_opener(
    data: Iterable[Any], handler: Handler | None = None, *, cache: Cache, **_gopen_options: Any
) -> Iterator[dict[str, Any]]:
    """Open the shards of a pipeline. This stage replaces WebDataset's stage of the same name.

    Args:
        data: dicts with the key ``url``, or plain URLs.
        handler: called with the exception if a shard cannot be opened; the URL is appended to the
            exception's ``args``. It returns True to continue with the next shard, or False to stop.
            The default raises the exception.
        cache: the cache to read through.
        **_gopen_options: ignored; WebDataset's function takes options for its pipes.

    Yields:
        The same dicts, with ``stream``, which the consumer may close, and ``local_path``: the path
        of the cached shard, or its URL while it has no path. The field is never missing, because
        all samples of a batch need the same fields.
    """

    def parsed(item: Any) -> ShardURL:
        return cache.parse(item["url"] if isinstance(item, dict) else item)

    ahead, opened, failed, first = Lookahead(cache.process, data, parsed), 0, 0, None
    for item in ahead:
        sample: dict[str, Any] = item if isinstance(item, dict) else {"url": item}
        try:
            stream = ahead.open()
        except Exception as exn:  # noqa: BLE001 - the handler decides, as in WebDataset
            exn.args = (*exn.args, shown_url(str(sample["url"])))
            is_handled = (handler or reraise)(exn)
            log_once(exn, str(sample["url"]), cache)
            failed, first = failed + 1, first or exn
            if is_handled:
                continue
            break
        opened += 1
        sample |= {"stream": stream, "local_path": stream.name.removeprefix("file://")}
        yield sample
        # Without this, the references would keep the shard in use while the next one is downloaded.
        del stream, sample, item
    if failed and not opened:
        logger.error("none of %d shards could be opened; the first error: %s", failed, first)


def reraise(exn: Exception) -> bool:
    """Raise the exception. This is the default handler."""
    raise exn


@functools.cache
def _warn(url: str, problem: str) -> None:
    """Log what is wrong with a shard, once per process."""
    logger.warning(MALFORMED, shown_url(url), problem)


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
        url = source["url"]
        local_path = source.get("local_path")
        keys, prefix = set[str](), "\0"
        try:
            stream = source["stream"]
            walk = TarWalk(stream)
            for name in walk:
                try:
                    if is_meta(name):
                        continue
                    if rename_files:
                        name = rename_files(name)
                    if select_files is not None and not select_files(name):
                        continue
                    sample = {"fname": name, "data": walk.read(), "__url__": url}
                except Exception as exn:  # noqa: BLE001 - the handler decides
                    if hasattr(exn, "args") and len(exn.args) > 0:
                        exn.args = (f"{exn.args[0]!s} @ {stream!s}", *exn.args[1:])
                    if handler(exn):
                        continue
                    break
                if not name.startswith(prefix) and (found := split(name)):  # another sample begins
                    prefix = found[1] + "."
                    if prefix in keys:
                        _warn(str(url), REPEATED.format(ascii(found[1])[1:-1]))
                        prefix = ""  # once per shard
                    keys.add(prefix)
                if local_path is not None:
                    sample["__local_path__"] = local_path
                yield sample
            if eof_value is not None:
                yield eof_value
        except Exception as exn:  # noqa: BLE001 - the handler decides
            exn.args = (*exn.args, source.get("stream"), shown_url(str(source.get("url"))))
            if not handler(exn):
                return


def tar_samples(
    data: Iterable[dict[str, Any]],
    handler: Handler = reraise,
    select_files: Callable[[str], bool] | None = None,
    rename_files: Callable[[str], str] | None = None,
) -> Iterator[dict[str, Any]]:
    """Expand opened shards into samples, with `tar_files` and WebDataset's ``group_by_keys``.

    Args:
        data, handler, select_files, rename_files: the arguments of `tar_files`.

    Yields:
        ``dict(__key__=..., __url__=..., field=bytes, ...)``.
    """
    from webdataset.tariterators import group_by_keys

    files = tar_files(data, handler, select_files, rename_files)
    samples: Iterator[dict[str, Any]] = group_by_keys(files, handler=handler)
    return samples


def attach(dataset: _Pipeline, cache: Cache, *, fast_tar: bool = True) -> _Pipeline:
    """Make a pipeline read its shards through ``cache``.

    Replaces the stage that opens URLs, and keeps its handler. Also replaces WebDataset's
    ``tar_file_expander`` by `tar_files`, which yields the same files in less time. A second call
    replaces the cache. Starts to prepare for the first miss in the background (`Cache.prepare`).
    Logs a warning, once per job, if the shards have the same order in every epoch, are fewer than
    their readers, or lie on a network filesystem, where they are not cached.

    Args:
        dataset: a ``WebDataset`` or any ``DataPipeline``.
        cache: the cache to read through.
        fast_tar: whether to replace ``tar_file_expander``.

    Returns:
        ``dataset`` itself.

    Raises:
        ConfigError: ``dataset`` has no stage that opens URLs, or a URL is a wildcard.
    """
    from webdataset import filters, shardlists

    pipeline = getattr(dataset, "pipeline", None)
    if not isinstance(pipeline, list):
        raise ConfigError(
            f"attach() takes a WebDataset or a DataPipeline, not {type(dataset).__name__}."
        )
    stages = [each for stage in pipeline for each in _replaced(stage, cache, fast_tar)]
    functions = [_call_of(stage)[0] for stage in stages]
    if url_opener not in functions:
        names = ", ".join(getattr(stage, "__name__", type(stage).__name__) for stage in pipeline)
        raise ConfigError(
            f"no stage of this pipeline opens URLs ({names}). Call attach() with the WebDataset "
            "itself, or use cache.url_opener as the stage that opens the shards."
        )
    if _repeats_order(stages) and is_new("order", cache):
        logger.warning(
            "every epoch will have the same order of shards, because this pipeline shuffles them "
            "with a fixed seed. WebDataset(shardshuffle=...) does so since version 0.2.109. For a "
            "new order in every epoch, write wds.DataPipeline(wds.SimpleShardList(urls), "
            "wds.split_by_node, wds.split_by_worker, wds.shuffle(100), wds.tarfile_to_samples())."
        )
    urls = getattr(stages[0], "urls", None)
    urls = [url for url in urls if isinstance(url, str)] if isinstance(urls, list) else []
    for url in [url for url in urls if "*" in url][:1]:
        cache.open(url).close()  # raises an error, unless an object has this name
    if not cache.config.cache_local:
        _warn_of_mounts(urls, cache)
    splits = [each in functions for each in (shardlists.split_by_node, shardlists.split_by_worker)]
    if type(stages[0]) is shardlists.SimpleShardList and any(splits):  # others may be endless
        stages.insert(1, filters.FilterFunction(_check_readers, len(urls), *splits, cache))
    pipeline[:] = stages
    cache.prepare(urls[0] if urls else None)
    return dataset


def _replaced(stage: Any, cache: Cache, fast_tar: bool) -> list[Any]:
    """Return the stages that replace ``stage``, or only ``stage`` if it need not be replaced.

    Stages that open URLs are replaced and, with ``fast_tar``, those that expand archives.
    """
    from webdataset import cache as wds_cache
    from webdataset import filters, tariterators

    # WebDataset 1.0 has these classes, and earlier versions have the function.
    openers = getattr(wds_cache, "StreamingOpen", ()), getattr(wds_cache, "FileCache", ())
    caching = getattr(wds_cache, "cached_tarfile_samples", None)
    combined = (tariterators.tarfile_samples, caching)  # each opens, expands and groups
    expander = tar_files if fast_tar else tariterators.tar_file_expander
    function, args, options = _call_of(stage)
    if isinstance(stage, openers):
        handler = stage.handler
    elif function is tariterators.tar_file_expander and fast_tar:
        return [filters.FilterFunction(tar_files, *args, **options)]
    elif function is _check_readers:
        return []
    elif function in (url_opener, tariterators.url_opener, *combined):
        handler = options.get("handler", next(iter(args), None))
    else:
        return [stage]
    stages = [filters.FilterFunction(url_opener, handler=handler, cache=cache)]
    if function in combined:
        kept = {name: options[name] for name in _EXPANDER_OPTIONS if name in options}
        stages += [
            filters.FilterFunction(expander, *args, **kept),
            filters.FilterFunction(tariterators.group_by_keys, handler=handler or reraise),
        ]
    return stages


def _repeats_order(stages: list[Any]) -> bool:
    """Return whether the shards are sure to have the same shuffled order in every epoch."""
    from webdataset import filters, shardlists

    splits = shardlists.split_by_node, shardlists.split_by_worker, shardlists.single_node_only
    seeded = False
    for stage in stages:
        function, args, options = _call_of(stage)
        if function is url_opener:
            return seeded
        if type(stage) is shardlists.SimpleShardList:
            seeded = stage.seed is not None
        elif function is filters.shuffle.f and options.get("seed") is not None:
            size = args[0] if args else options.get("bufsize", 1000)
            seeded = seeded or size > 1  # WebDataset(shardshuffle=False) has a shuffle of size 0
        elif function not in splits:
            return False  # an unknown stage may change the order
    return False


def _warn_of_mounts(urls: list[str], cache: Cache) -> None:
    """Log, once per job, that the shards on a network filesystem are not cached."""
    paths = (re.sub("^file:(//)?", "", url) for url in urls if re.match("file:|[^:]*$", url))
    for mount in map(mount_of, {*map(os.path.dirname, paths)}):
        if mount is not None and not mount.is_local and is_new("mount", cache):
            text = "shards on %s (%s) are read in place, not cached: set cache_local to cache them"
            logger.warning(text, mount.point, mount.type)


def _check_readers(data: Any, shards: int, by_node: bool, by_worker: bool, cache: Cache) -> Any:
    """Log, once per job, that a pipeline has fewer shards than ranks x workers. A stage."""
    from webdataset.utils import pytorch_worker_info  # which splits the shards as well

    _, ranks, _, workers = pytorch_worker_info()
    readers = (ranks := ranks if by_node else 1) * (workers := workers if by_worker else 1)
    if shards < readers and is_new("readers", cache):
        logger.warning(
            "%d shards are split among %d ranks x %d workers, so %d of %d readers get none. With "
            "DDP, a rank without samples blocks all others. Use more shards or fewer workers.",
            *(shards, ranks, workers, readers - shards, readers),
        )
    return data


def _call_of(stage: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return the function of a stage, and the arguments that follow its input data."""
    return getattr(stage, "f", stage), getattr(stage, "args", ()), getattr(stage, "kw", {})

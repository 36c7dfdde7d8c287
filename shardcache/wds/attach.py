"""WebDataset's ways in: `attach` and `url_opener`.

WebDataset's pipeline is a list of stages; the one that turns URLs into streams is replaced by
ours, and the one that takes archives apart by a faster one (`tar`). Nothing here is global, so
it works under fork, spawn and forkserver alike.

Streams stay open after they are yielded: WebDataset goes on reading them and drops them later.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from shardcache.errors import ConfigError
from shardcache.reading.lookahead import Lookahead
from shardcache.urls import ShardURL, redact
from shardcache.wds.gopen import log_once
from shardcache.wds.tar import reraise, tar_files

if TYPE_CHECKING:
    from shardcache.cache import Cache, Handler

logger = logging.getLogger(__name__)

_Pipeline = TypeVar("_Pipeline")
#: What WebDataset's expander takes.
_EXPANDING = ("handler", "select_files", "rename_files")


def url_opener(
    data: Iterable[Any], handler: Handler | None = None, *, cache: Cache, **_gopen_options: Any
) -> Iterator[dict[str, Any]]:
    """Open the shards of a pipeline; a drop-in for WebDataset's function of this name.

    Args:
        data: ``dict(url=...)`` samples, or plain URLs; other keys are kept.
        handler: called with the exception, the URL appended to its ``args``, when
            a shard cannot be opened: True goes on with the next, False stops.
            The default raises.
        cache: reads the shards.
        **_gopen_options: accepted for compatibility; they tune WebDataset's pipes.

    Yields:
        The same dicts with ``stream``, but without ``local_path``. Only cached shards have a path,
        and a batch needs samples with the same fields.

    Raises:
        Whatever ``handler`` raises; by default see `Cache.open`.
    """

    def parsed(item: Any) -> ShardURL:
        return cache.parse(item["url"] if isinstance(item, dict) else item)

    ahead, opened, failed, first = Lookahead(cache.opener, data, parsed), 0, 0, None
    for item in ahead:
        sample: dict[str, Any] = item if isinstance(item, dict) else {"url": item}
        try:
            stream = ahead.open()
        except Exception as exn:  # noqa: BLE001 - the handler decides, as in WebDataset
            exn.args = (*exn.args, redact(str(sample["url"])))
            go_on = (handler or reraise)(exn)
            log_once(exn, str(sample["url"]))
            failed, first = failed + 1, first or exn
            if go_on:
                continue
            break
        opened += 1
        sample["stream"] = stream
        yield sample
        # The consumer owns the stream now; holding on to it here would keep the
        # last shard pinned while the next one is fetched.
        del stream, sample, item
    if failed and not opened:
        logger.error("none of %d shards could be opened. The first: %s", failed, first)


def attach(dataset: _Pipeline, cache: Cache, *, fast_tar: bool = True) -> _Pipeline:
    """Make a pipeline read its shards through ``cache``.

    Replaces the stage that opens URLs, and keeps its handler. Attaching again replaces the cache.
    Also replaces WebDataset's own ``tar_file_expander`` by `tar_files`, which yields the same in
    less time. Prepares the first miss in the background (`Cache.prepare`). Logs a warning, once per
    process, if the pipeline shuffles its shards in the same way in every epoch.

    Args:
        dataset: a ``WebDataset`` or any ``DataPipeline``.
        cache: reads the shards.
        fast_tar: whether to replace the expander.

    Returns:
        ``dataset`` itself.

    Raises:
        ConfigError: there is no such stage in ``dataset``.
    """
    pipeline = getattr(dataset, "pipeline", None)
    if not isinstance(pipeline, list):
        raise ConfigError(
            f"attach() takes a WebDataset or a DataPipeline, not {type(dataset).__name__}"
        )
    stages = [each for stage in pipeline for each in _replaced(stage, cache)]
    if stages == pipeline:
        names = ", ".join(getattr(stage, "__name__", type(stage).__name__) for stage in pipeline)
        raise ConfigError(
            f"no stage of this pipeline opens URLs ({names}). Call attach() on the WebDataset "
            "itself, or put cache.url_opener where the pipeline opens its shards."
        )
    if _repeats_order(stages):
        _warn_of_repeated_order()
    pipeline[:] = map(_faster, stages) if fast_tar else stages
    urls = getattr(stages[0], "urls", None)
    cache.prepare(urls[0] if isinstance(urls, list) and urls else None)
    return dataset


def _replaced(stage: Any, cache: Cache) -> list[Any]:
    """The stages that take the place of one that opens URLs; any other stage as it is."""
    from webdataset import cache as webdatasets
    from webdataset import filters, tariterators

    # Of WebDataset 1.0, and of versions before it.
    opening = getattr(webdatasets, "StreamingOpen", ()), getattr(webdatasets, "FileCache", ())
    caching = getattr(webdatasets, "cached_tarfile_samples", None)
    together = (tariterators.tarfile_samples, caching)  # they open, expand and group
    function, args, options = _called(stage)
    if isinstance(stage, opening):
        handler = stage.handler
    elif function in (url_opener, tariterators.url_opener, *together):
        handler = options.get("handler", next(iter(args), None))
    else:
        return [stage]
    stages = [filters.FilterFunction(url_opener, handler=handler, cache=cache)]
    if function in together:
        kept = {name: options[name] for name in _EXPANDING if name in options}
        stages += [
            filters.FilterFunction(tariterators.tar_file_expander, *args, **kept),
            filters.FilterFunction(tariterators.group_by_keys, handler=handler or reraise),
        ]
    return stages


def _repeats_order(stages: list[Any]) -> bool:
    """Whether the stages certainly shuffle the shards in the same way in every epoch.

    False if there is any other stage before the shards are opened, because it may change the order.
    """
    from webdataset import filters, shardlists

    splits = shardlists.split_by_node, shardlists.split_by_worker, shardlists.single_node_only
    seeded = False
    for stage in stages:
        function, args, options = _called(stage)
        if function is url_opener:
            return seeded
        if type(stage) is shardlists.SimpleShardList:
            seeded = stage.seed is not None
        elif function is filters.shuffle.f and options.get("seed") is not None:
            size = args[0] if args else options.get("bufsize", 1000)
            seeded = seeded or size > 1  # WebDataset(shardshuffle=False) has a shuffle of size 0
        elif function not in splits:
            return False
    return False


@functools.cache
def _warn_of_repeated_order() -> None:
    """Log, once per process, that every epoch has the same order of shards."""
    logger.warning(
        "every epoch will have the same order of shards, because this pipeline shuffles them with "
        "a fixed seed. WebDataset(shardshuffle=...) does so since version 0.2.109. For a new order "
        "in every epoch, write wds.DataPipeline(wds.SimpleShardList(urls), wds.split_by_node, "
        "wds.split_by_worker, wds.shuffle(100), wds.tarfile_to_samples())."
    )


def _faster(stage: Any) -> Any:
    """Our expander in place of WebDataset's, with its arguments; any other stage as it is."""
    from webdataset.filters import FilterFunction
    from webdataset.tariterators import tar_file_expander

    function, args, options = _called(stage)
    return FilterFunction(tar_files, *args, **options) if function is tar_file_expander else stage


def _called(stage: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The function that a stage calls, and its arguments behind the data."""
    from webdataset.filters import FilterFunction

    if isinstance(stage, FilterFunction):
        return stage.f, stage.args, stage.kw
    return stage, (), {}

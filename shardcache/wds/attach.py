"""WebDataset's ways in: `attach`, `url_opener`, `register`.

WebDataset's pipeline is a list of stages; the one that turns URLs into streams is replaced by
ours, and those that take archives apart by a faster one (`samples`). Nothing here is global, so it
works under fork, spawn and forkserver alike; only `register` writes into WebDataset's own table,
which a spawned worker does not inherit.

Streams stay open after they are yielded: WebDataset goes on reading them and drops them later.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from shardcache.errors import ConfigError
from shardcache.streams.prefetch import Lookahead
from shardcache.urls import ShardURL, redact
from shardcache.wds.samples import quicken, reraise, restore

if TYPE_CHECKING:
    from shardcache.cache import Cache
    from shardcache.options import Handler

_Pipeline = TypeVar("_Pipeline")


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
        The same dicts with ``stream`` and, unless streamed, ``local_path``.

    Raises:
        Whatever ``handler`` raises; by default see `Cache.open`.
    """
    handle = reraise if handler is None else handler

    def parsed(item: Any) -> ShardURL:
        return cache.parse(item["url"] if isinstance(item, dict) else item)

    ahead = Lookahead(cache.opener, data, parsed)
    for item in ahead:
        sample: dict[str, Any] = item if isinstance(item, dict) else {"url": item}
        try:
            stream, path = ahead.open()
        except Exception as exn:  # noqa: BLE001 - the handler decides, as in WebDataset
            exn.args = (*exn.args, redact(str(sample["url"])))
            if handle(exn):
                continue
            return
        sample["stream"] = stream
        if path is not None:
            sample["local_path"] = path
        yield sample
        # The consumer owns the stream now; holding on to it here would keep the
        # last shard pinned while the next one is fetched.
        del stream, sample, item


@dataclass(eq=False)
class CachedOpen:
    """A pipeline stage that opens shards through a cache, see `url_opener`; picklable."""

    cache: Cache
    handler: Handler | None = None

    def __call__(self, data: Iterable[Any]) -> Iterator[dict[str, Any]]:
        """Run the stage; see `url_opener`."""
        return url_opener(data, self.handler, cache=self.cache)


def attach(dataset: _Pipeline, cache: Cache, *, fast_tar: bool = True) -> _Pipeline:
    """Make a pipeline read its shards through ``cache``.

    The stage that opens URLs is swapped in place, with its handler kept. Attaching again replaces
    the cache. WebDataset's own stages behind it, ``tar_file_expander`` and ``group_by_keys``, are
    replaced by one that yields the same samples in less time. What the first miss needs is made
    ready in the background (`Cache.prepare`).

    Args:
        dataset: a ``WebDataset`` or any ``DataPipeline``.
        cache: reads the shards.
        fast_tar: False leaves those two as they are, or puts them back.

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
    for index, stage in enumerate(pipeline):
        if replacement := _replacement(stage, cache):
            pipeline[index : index + 1] = replacement
            (quicken if fast_tar else restore)(pipeline)
            cache.prepare(_first_url(pipeline))
            return dataset
    names = ", ".join(getattr(stage, "__name__", type(stage).__name__) for stage in pipeline)
    raise ConfigError(
        f"no stage of this pipeline opens URLs ({names}). Call attach() on the WebDataset itself, "
        "or put cache.url_opener where the pipeline opens its shards."
    )


def _first_url(pipeline: list[Any]) -> str | None:
    """The first shard of a pipeline that begins with a list of them."""
    urls = getattr(pipeline[0], "urls", None)
    return urls[0] if isinstance(urls, list) and urls and isinstance(urls[0], str) else None


def _replacement(stage: Any, cache: Cache) -> list[Any]:
    """The stages that take the place of one that opens URLs; none of another one."""
    from webdataset import cache as wds_cache
    from webdataset import tariterators
    from webdataset.filters import FilterFunction

    if isinstance(stage, (wds_cache.StreamingOpen, wds_cache.FileCache, CachedOpen)):
        return [CachedOpen(cache, stage.handler)]
    function, args, options = stage, (), {}
    if isinstance(stage, FilterFunction):
        function, args, options = stage.f, stage.args, stage.kw
    handler = options.get("handler", next(iter(args), None))
    if function is tariterators.url_opener:
        return [CachedOpen(cache, handler)]
    if function is tariterators.tarfile_samples:  # it opens, expands and groups
        grouping = {} if handler is None else {"handler": handler}
        return [
            CachedOpen(cache, handler),
            FilterFunction(tariterators.tar_file_expander, *args, **options),
            FilterFunction(tariterators.group_by_keys, **grouping),
        ]
    return []


def register(scheme: str, cache: Cache) -> None:
    """Let ``cache`` open all URLs of one scheme, such as ``s3``, in WebDataset's own ``gopen``.

    For code whose pipeline cannot be changed. The table lives in this process:
    forked workers inherit it, spawned ones must call this in ``worker_init_fn``.
    """
    import webdataset

    def gopen(url: str, mode: str = "rb", bufsize: int = 8192, **options: Any) -> BinaryIO:
        if mode != "rb":
            raise ConfigError(f"{url}: the cache reads shards; mode {mode!r} is not supported")
        return cache.open(url)

    webdataset.gopen_schemes[scheme] = gopen

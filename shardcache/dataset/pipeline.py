"""WebDataset pipelines that resume exactly, and that shuffle the places of samples, not bytes.

Filters that do not look at samples, such as ``shuffle``, get a place for each sample: an integer
with the number of a shard and of a sample in it. Behind the last of them, the samples are read.
The order of the places depends only on a seed, the shards and their numbers of samples. So a state
is the number of places that were read, and to resume is to draw them again without reading.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import inspect
import json
import logging
import math
import multiprocessing
import os
import random
import re
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache as cached
from functools import partial
from io import UnsupportedOperation
from itertools import islice, zip_longest
from pathlib import Path
from secrets import token_hex
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from zlib import crc32

import webdataset
from torch.utils.data import DataLoader, get_worker_info
from webdataset import filters, shardlists
from webdataset.filters import FilterFunction
from webdataset.pipeline import add_length_method
from webdataset.utils import pytorch_worker_info  # WebDataset splits the shards by it

from shardcache import wds
from shardcache.dataset.index import OpenShard, OpenShards
from shardcache.dataset.order import checked_int
from shardcache.dataset.sampler import warn_of_room
from shardcache.errors import ConfigError, ShardCacheError
from shardcache.faults import ignoring, system_error
from shardcache.ranks import detect
from shardcache.reading.lookahead import Prefetcher
from shardcache.reading.stream import ShardStream, open_shard
from shardcache.urls import shown_url

if TYPE_CHECKING:
    from shardcache.cache import Cache

logger = logging.getLogger(__name__)

_Pipeline = TypeVar("_Pipeline")
_REMEMBERED = 64  # iterations whose epochs are known; a worker may be as many behind another
_EVENT = 128  # bytes, which lie in one page of memory, so that no reader sees a part of them
_MFD_CLOEXEC = 1  # of memfd_create(2)
_BITS = 32  # of the number of a sample in a place
_COUNTS = re.compile(r"( ~?[0-9]{1,9})*( ~)?").fullmatch  # the ``counts`` of a state
_COUNTED = 1 << 20  # bytes that are counted at once, because each count takes 2 us
_SHUFFLES = {filters.shuffle.f, filters.detshuffle}
#: Stages that do not look at samples. WebDataset has `check_empty` since 1.0.
_BLIND = {*_SHUFFLES, filters.slice.f, getattr(webdataset.compat, "check_empty", None)}
#: Stages without a buffer of samples, once `_batched` has replaced ``batched``.
_DIRECT_NAMES = (
    "associate batched decode extract_keys info log_keys map map_dict map_tuple rename rename_keys "
    "select to_tuple xdecode"
)
_DIRECT = {getattr(getattr(filters, n, None), "f", None) for n in _DIRECT_NAMES.split()}
#: Stages that are objects and repeat their order.
_OBJECTS = {shardlists.SimpleShardList, shardlists.ResampledShards, list, map, filter}


def attach_resumable(dataset: _Pipeline, cache: Cache) -> _Pipeline:
    """Attach a pipeline to the cache, and give it the methods of `Resumable`.

    Raises the errors of `wds.attach`; ConfigError if a stage does not give the same samples again.
    """
    pipeline: Any = wds.attach(dataset, cache, is_reseeded=True)
    base: Any = type(pipeline)
    if not isinstance(pipeline, Resumable):
        pipeline.__class__ = _resumable(base)
    pipeline._begin(cache)
    return dataset


@cached
def _resumable(base: type) -> type:
    bases = (Resumable,) if issubclass(Resumable, base) else (base, Resumable)  # own methods first
    return type(f"Resumable{base.__name__}", bases, {"_base": base})


def _restored(base: type, has_length: bool) -> Any:
    pipeline: Any = object.__new__(_resumable(base))
    return add_length_method(pipeline) if has_length else pipeline


def _kind(stage: Any) -> Any:
    """Return the function of a stage, or the class of a stage that is an object."""
    function = wds._call_of(stage)[0]
    return function if isinstance(function, type | FunctionType) else type(function)


def _shuffle_of(stage: Any) -> dict[str, Any]:
    """Return the arguments of a shuffle; none for other stages."""
    if _kind(stage) is filters.detshuffle:
        return {"bufsize": stage.bufsize, "initial": stage.initial, "seed": stage.seed}
    if _kind(stage) is not filters.shuffle.f:
        return {}
    function, args, options = wds._call_of(stage)
    names = islice(inspect.signature(function).parameters, 1, None)
    return {"bufsize": 1000, **dict(zip(names, args, strict=False)), **options}


def _shown(value: Any) -> str:
    """Describe a stage or an argument, the same in every run."""
    if isinstance(value, FilterFunction):
        given = [*map(_shown, value.args), *(f"{n}={_shown(v)}" for n, v in value.kw.items())]
        return f"{value.f.__name__.strip('_')}({', '.join(given)})"
    if isinstance(value, tuple):
        return f"({', '.join(map(_shown, value))}{',' * (len(value) == 1)})"
    if isinstance(value, str | int | float | None):
        return repr(value)
    return f"{getattr(value, '__qualname__', type(value).__name__)}{_shuffle_of(value) or ''}"


def _options_of(stage: Any) -> dict[str, Any]:
    """Return the options of a stage that reads shards, and the default ones."""
    _, args, options = wds._call_of(stage)
    reraise = None, wds.reraise, filters.reraise_exception
    raises = {"handler": wds.reraise} if options.get("handler") in reraise else {}
    return {"args": args, "select_files": None, "rename_files": None, **options, **raises}


def _refuse(stage: Any) -> None:
    """Raise ConfigError for a stage that cannot give the same samples again."""
    kind, seed = _kind(stage), getattr(stage, "seed", None)
    _, args, options = wds._call_of(stage)
    if (
        (isinstance(kind, type) and kind not in _OBJECTS | _BLIND)
        or any(isinstance(argument, random.Random) for argument in (*args, *options.values()))
        or kind in (filters.rsample.f, shardlists.resampled.f)
        or _shuffle_of(stage).get("rng") is not None
        or isinstance(seed, float | bool)  # the time
    ):
        raise ConfigError(
            f"{_shown(stage)} cannot resume: it draws without a seed, or may have a state of its "
            "own. Use WebDataset's shuffle or detshuffle, resampled=True, and functions."
        )


class _Draws(random.Random):
    """Draws what `random.Random` draws, but faster: a resume draws a whole epoch."""

    def randint(self, a: int, b: int) -> int:
        draw, bits = self.getrandbits, (count := b - a + 1).bit_length()
        while (number := draw(bits)) >= count:
            pass
        return a + number


@dataclass
class _Run:
    """A position in an epoch."""

    epoch: int
    given: int = 0  #: outputs of the pipeline
    before: int = 0  #: those of earlier passes
    passes: int = 0  #: complete passes over the shards; `repeat` makes several in an epoch
    entered: int = 0  #: places of this pass that were read
    #: The samples of each shard of this pass so far: "~12" if they are read in sequence, and "~"
    #: for such a shard whose end was not read yet.
    counts: str = ""
    check: int = 0  #: a checksum of their URLs
    #: What the handler of an error has ended in this pass: the "shards", or the "samples" as well.
    ended: str = ""

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> _Run:
        """Return the position in a state. Raises ConfigError for a field that is not valid."""

        def number(name: str, *most: float) -> int:
            return checked_int(f"state[{name!r}]", state.get(name), 0, *most)

        counts, ended = str(state.get("counts")), state.get("ended")
        if not _COUNTS(counts) or ended not in ("", "shards", "samples"):
            raise ConfigError(f"no pipeline saves a state with {counts=!s:.80} and {ended=!s:.80}.")
        number("seed")
        number("worker", number("workers") - 1)
        given, places = number("given"), sum(float(n.strip("~") or "inf") for n in counts.split())
        return cls(
            number("epoch"), given, number("before", given), number("passes"),
            number("entered", places), counts, number("check"), ended,
        )  # fmt: skip

    def begin_again(self) -> None:
        """Return to the start of the pass, whose outputs will be made again."""
        self.given, self.entered, self.ended = self.before, 0, self.ended and "shards"

    def list_again(self) -> tuple[list[str], int]:
        """Return the counts of the shards and their checksum, and forget them."""
        counts, check, self.counts, self.check = self.counts.split(), self.check, "", 0
        return counts, check

    def end(self, what: str) -> None:
        self.ended = what

    def counted(self, samples: int) -> None:
        """Note the number of samples of the last shard, which was read to its end."""
        self.counts += str(samples)

    def enter(self, url: str, count: str) -> None:
        self.counts += f" {count}"
        self.check = crc32(os.fsencode(url), self.check)


class _Epochs(NamedTuple):
    """The epochs of a pipeline: the result of the events in a log."""

    epoch: int = 0  #: of the next iteration
    loads: int = 0  #: states that were loaded
    loaded: int = -1  #: the epoch of the last one, until an iteration continues it
    seed: int = -1  #: that of the last one; -1 without one
    #: The last iteration: "begin" in this process, "work" in workers of a loader, "end" there.
    phase: str = ""
    #: The names of iterations -> their epochs, and whether they continue the loaded state.
    begun: dict[str, tuple[int, bool]] = {}

    def after(self, kind: str, epoch: int = -1, name: str = "", seed: int = -1) -> _Epochs:
        """Return the epochs after one more event.

        Args:
            kind: "set" or "load", with an epoch; "begin", or "work" and "end" in a worker.
            epoch: of an iteration, only if it continues a state that only this worker has loaded.
            name: of an iteration, the same in all workers that share it.
            seed: of a state that was loaded, here or only in this worker.
        """
        if kind == "set":
            return self._replace(epoch=epoch)
        if kind == "load":
            return self._replace(epoch=epoch, loads=self.loads + 1, loaded=epoch, seed=seed)
        if kind == "end":  # of an iteration that may not be the last one
            return self._replace(phase=kind) if self.phase == "work" else self
        if name in self.begun:  # by another worker
            return self
        is_continued = epoch >= 0 or self.loaded == self.epoch
        epoch = epoch if epoch >= 0 else self.epoch
        begun = dict([*self.begun.items(), (name, (epoch, is_continued))][-_REMEMBERED:])
        loaded = -1 if is_continued else self.loaded
        seed = seed if seed >= 0 else self.seed
        return _Epochs(epoch + 1, self.loads, loaded, seed, kind, begun)


class _EpochLog:
    """The events of a pipeline, in memory that a process shares with the workers of its loaders.

    Events are appended and never change. So there is no lock, which a signal handler might enter
    twice and a forked child might find held. Processes open the memory by the path of its owner's
    descriptor, so nothing is left when the owner dies.
    """

    def __init__(self) -> None:
        self._known = 0, _Epochs()  # bytes of events that were read, and their result
        self._create()
        _logs.add(self)

    def _create(self) -> None:
        # Not by `os.memfd_create`, which a Python that was built on an old system does not have.
        number = ctypes.CDLL(None, use_errno=True).memfd_create(b"shardcache", _MFD_CLOEXEC)
        if number < 0:
            raise OSError(ctypes.get_errno(), "no memory for the epochs of a pipeline")
        weakref.finalize(self, os.close, number)
        owner, self._inode = os.getpid(), os.fstat(number).st_ino
        self._path, self._known = Path(f"/proc/{owner}/fd/{number}"), (0, self._known[1])
        self._owner = owner  # last, as a signal handler may raise before

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_owner": 0}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        _logs.add(self)

    def add(self, *event: object) -> _Epochs:
        """Append an event, if there is one. Return the result of all events up to now."""
        if self._owner != os.getpid() and not (get_worker_info() and self._exists()):
            self._create()  # a copy, or a forked child, goes on with what it knows
        size, epochs = self._known
        with open(self._path, "ab+", buffering=0) as file:
            if event:
                file.write(json.dumps(event).encode().ljust(_EVENT))
            while data := os.pread(file.fileno(), _EVENT, size):
                size, epochs = size + _EVENT, epochs.after(*json.loads(data))
        self._known = size, epochs
        return epochs

    def _exists(self) -> bool:
        with ignoring(OSError):
            return self._path.stat().st_ino == self._inode
        return False


class Resumable(webdataset.DataPipeline):  # type: ignore[misc]
    """A ``WebDataset`` or ``DataPipeline`` that continues an epoch where it stopped.

    Each iteration is another epoch, with another order. A state is that of one worker of one rank.
    torchdata's ``StatefulDataLoader`` saves and loads the states of all workers, and `track` does
    so for a plain ``DataLoader``.
    """

    _base: Any  #: the class before `attach`

    def _begin(self, cache: Cache) -> None:
        """Prepare a pipeline that is attached, perhaps once more."""
        seed, source = getattr(self, "seed", None), self.pipeline[0]
        opener = [*map(_kind, self.pipeline)].index(wds.url_opener)
        for number, stage in enumerate(self.pipeline[:opener]):
            # WebDataset passes its own seed, which may be random, to its shuffle of the shards.
            is_own = isinstance(self, webdataset.WebDataset) and seed is not None
            if is_own and (options := _shuffle_of(stage)).pop("seed", None) == seed:
                self.pipeline[number] = FilterFunction(filters.shuffle.f, **options)
        urls = source if isinstance(source, list) else getattr(source, "urls", [])
        names = "\n".join(str(wds.shard_of(cache, url)) for url in urls)
        self._shards = f"{len(urls)} shards, checksum {crc32(os.fsencode(names)):08x}"
        self._run: _Run | None = None
        self._tracked: dict[str, Any] | None = None  # the state of the last `track`
        self._loaded: Mapping[str, Any] = {}  # the last state
        self._load = 0  # the number of that call, or -1 in a worker
        self._turns = 0
        self._is_extended = False
        self._log = _EpochLog()
        self._seed = crc32(str(seed).encode())
        self._stage_positions()

    def __reduce__(self) -> tuple[Any, ...]:
        self._log.add()  # copies begin with what is known, and spawned workers find the log
        own: dict[str, Any] = {"_run": None, "_tracked": None, "_is_extended": False}
        own["_log"] = copy.copy(self._log)
        has_length = type(self) is not _resumable(self._base)  # since `attach`
        return _restored, (self._base, has_length), vars(self) | own

    def compose(self, *args: Any) -> Any:
        """Return a copy with more stages, as ``.map`` and others do. It has a state of its own."""
        extended = super().compose(*args)
        self._is_extended = True
        return extended

    def append(self, f: Any) -> None:
        """Append a stage, as `compose` and ``.map`` do. Raises ConfigError if it cannot resume."""
        _refuse(f)
        super().append(f)

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration, from 0."""
        return self._log.add().epoch

    def set_epoch(self, epoch: int) -> None:
        """Begin the next iteration with ``epoch``, or continue it if its state was loaded."""
        epochs, epoch = self._log.add(), checked_int("epoch", epoch, 0)
        will_continue = self._will_continue(epochs)
        if epoch != epochs.epoch or not will_continue:
            if will_continue:
                logger.warning("set_epoch(%d) leaves the position that was loaded", epoch)
            self._log.add("set", epoch)
            self._run = self._tracked = None

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last sample, or after the last batch of `track`."""
        tracked, epochs = self._tracked, self._log.add()
        if tracked is not None and tracked["until"] in (None, epochs.epoch):
            return {"epoch": tracked["epoch"], "workers": [*tracked["workers"]]}
        if self._will_continue(epochs):
            return dict(self._loaded)
        is_elsewhere = epochs.phase in ("work", "end") and get_worker_info() is None
        run = None if is_elsewhere else self._run
        if run is None and epochs.phase == "work" and wds.is_new("untracked", self._cache):
            logger.warning(
                "this is the state of the next epoch: only the workers of a DataLoader know the "
                "position in this one. Iterate over dataset.track(loader)."
            )
        if self._is_extended and not self._turns and wds.is_new("extended", self._cache):
            logger.warning(
                "`.map` or another method has made a copy of this pipeline with more stages, and "
                "this is not the state of the copy. Save and load that of the copy."
            )
        return self._state(run or _Run(epochs.epoch))

    def _will_continue(self, epochs: _Epochs) -> bool:
        """Return whether the next iteration will continue the state that was loaded."""
        return bool(self._loaded) if self._load < 0 else epochs.loaded == epochs.epoch

    def _state(self, run: _Run) -> dict[str, Any]:
        stages = [*map(_shown, self.pipeline), f"repeat({self.repetitions}, {self.nsamples})"]
        state = {**vars(run), "version": 1, "seed": self._seed, "shards": self._shards}
        ranks = zip(("rank", "world_size", "worker", "workers"), pytorch_worker_info(), strict=True)
        return {**state, "stages": " | ".join(stages), **dict(ranks)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin the next iteration at the position of a state.

        Raises:
            ConfigError: the state was saved with other shards, stages, ranks or workers.
        """
        is_ours = isinstance(state, Mapping) and {"shards", "stages", "workers"} & state.keys()
        workers: list[Any] = _workers_of(state) if is_ours else [None]
        if not all(isinstance(worker, Mapping) for worker in workers):
            raise ConfigError("this is not the state of a pipeline. Pass one of state_dict().")
        epoch = checked_int("state['epoch']", state.get("epoch"), 0)
        for worker in workers:
            self._refuse_other(worker, "version", "shards", "stages", "rank", "world_size")
            checked_int("state['epoch'] of a worker", _Run.of(worker).epoch, epoch, epoch)
        self._seed = workers[-1]["seed"] if workers else self._seed
        self._loaded = {**state, "epoch": epoch}
        event = "load", epoch, "", self._seed
        self._load = -1 if get_worker_info() else self._log.add(*event).loads
        self._run = self._tracked = None  # last: a signal handler may save a state at any moment

    def _loaded_by_worker(self, workers: int) -> dict[int, Any]:
        """Return the loaded state of each worker; ConfigError if their number was another one."""
        states = _workers_of(self._loaded)
        for state in states:
            if state["given"] or state["passes"] or state["entered"]:
                self._refuse_other(state, "workers", "stages", workers=workers)
        return {state["worker"]: state for state in states}

    def _refuse_other(self, state: Mapping[str, Any], *names: str, **changes: int) -> None:
        current = self._state(_Run(0)) | changes
        for name in names:
            before, now = state.get(name), current[name]
            if before == now:
                continue
            if name == "stages":
                pairs = zip_longest(str(before).split(" | "), now.split(" | "))
                before, now = next(pair for pair in pairs if pair[0] != pair[1])
            raise ConfigError(
                f"the state was saved with other {name}: {before}, and now {now}. Resume with the "
                "same. A TarDataset may resume with other ranks and workers."
            )

    def track(self, loader: Any) -> Iterator[Any]:
        """Iterate over a plain ``DataLoader`` of this pipeline. Then `state_dict` returns the
        positions of its workers after the last batch, and not how far they have read ahead: until
        another iteration begins, or an epoch or a state is set. After all batches, it returns the
        start of the next epoch.
        """
        is_plain = isinstance(loader, DataLoader) and not hasattr(loader, "load_state_dict")
        if not is_plain or loader.dataset is not self:  # the state of a copy would not fit
            raise ConfigError(
                f"track takes torch's DataLoader of this pipeline, no {type(loader).__name__}, and "
                "none of a copy, such as dataset.batched(8) returns. Write: dataset = "
                "dataset.batched(8), then dataset.track(torch.utils.data.DataLoader(dataset, ...))."
            )
        tracked = vars(loader).get("_tracked_by_shardcache")  # its workers may persist
        if tracked is None:
            tracked = copy.copy(loader)
            tracked._iterator = None
            tracked.collate_fn = partial(_collated, loader.collate_fn, self)
            if loader.persistent_workers:
                loader._tracked_by_shardcache = tracked
        epochs, constant = self._log.add(), self._state(_Run(0))
        workers = loader.num_workers or 1
        loaded = self._loaded_by_worker(workers) if self._will_continue(epochs) else {}
        states = [loaded.get(worker) for worker in range(workers)]
        # After a loop that was left, the position holds until another iteration begins.
        self._tracked = saved = {"epoch": epochs.epoch, "workers": states, "until": None}
        is_over, is_exiting = bool(loaded), sys.is_finalizing  # at the exit, `sys` may be None
        try:
            for position, batch in tracked:
                saved["epoch"], is_over = position["epoch"], False
                states[position["worker"]] = constant | position
                yield batch
                if self._tracked is not saved:
                    text = "a state was loaded or an epoch set during this iteration: begin another"
                    raise ConfigError(f"{text} one.")
            if self._tracked is saved:
                self._run = self._tracked = None
            if is_over:
                text = "the state has the end of epoch %d, of which no batch is left"
                logger.warning(text, saved["epoch"])
        finally:
            if not is_exiting():
                saved["until"] = self.epoch

    def __iter__(self) -> Iterator[Any]:
        try:
            return self._iterate(*self._begin_run())  # now, as it changes `state_dict`
        except ConfigError as exn:  # of `next`, because here it would end a persistent worker
            return map(wds.reraise, [exn])

    def _begin_run(self) -> tuple[Any, ...]:
        """Begin an iteration; return the arguments of `_iterate`.

        The workers of a loader read the same epoch: that of the first which begins it.
        """
        plan, info = self._stage_positions(), get_worker_info()
        _, _, worker, workers = pytorch_worker_info()
        kind, name = ("work", f"{_loader()}-{self._turns}") if info else ("begin", token_hex(4))
        self._turns += 1
        if info and 0 <= self._load < self._log.add().loads:
            raise ConfigError(
                "a state was loaded after the persistent workers of this loader had started. "
                "Resume with a new DataLoader."
            )
        loaded_epoch = self._loaded.get("epoch", -1) if self._load < 0 else -1
        loaded_seed = self._seed if self._load < 0 else -1
        event, begun = (kind, loaded_epoch, name, loaded_seed), (-1, False)
        while (expected := self._log.add().after(*event).begun[name]) != begun:
            epoch, is_continued = expected  # again, if another worker began in the meantime
            is_continued = loaded_epoch == epoch if loaded_epoch >= 0 else is_continued
            state = self._loaded_by_worker(workers).get(worker) if is_continued else None
            run = _Run(epoch) if state is None else _Run.of(state)
            self._run = copy.copy(run)  # first: a signal handler may save a state at any moment
            epochs = self._log.add(*event)
            begun = epochs.begun[name]
        self._seed = epochs.seed if epochs.seed >= 0 else self._seed
        if self._load < 0:
            self._loaded = {}
        return run, *plan

    def _iterate(self, run: _Run, opener: int, read: int, is_direct: bool) -> Iterator[Any]:
        """Yield the rest of an epoch, after the position ``run``."""
        most = self.nsamples if self.repetitions != 1 and self.nsamples > 0 else sys.maxsize
        # A pass that continues may have no output left.
        given, is_empty = run.given, not run.given
        if not is_direct:
            run.begin_again()
        while run.passes < self.repetitions and run.given < most:
            for output in self._pass(run, opener, read):
                is_empty = False
                run.given += 1
                if run.given > given:
                    # Without what enters before the next output.
                    self._run = _Run(*vars(run).values())
                    yield output
                if run.given >= most:
                    break
            passes = self.repetitions if is_empty else run.passes + 1
            run, is_empty = _Run(run.epoch, run.given, run.given, passes), True
        if get_worker_info():
            self._log.add("end")
        self._run = run

    def _pass(self, run: _Run, opener: int, read: int) -> Any:
        stages = [self._repeatable(number, run) for number in range(len(self.pipeline))]
        total = len(getattr(stages[0], "urls", ())) or sys.maxsize
        shards = _Shards(self._cache, run, self.pipeline[opener:read], total)
        if shards.is_plain:
            stages[read:read] = [shards.read]
        stages[opener : min(read, opener + 3)] = [shards.places]
        source = self.invoke(stages[0])
        for stage in stages[1:]:
            source = self.invoke(stage, source)
        return source

    def _repeatable(self, number: int, run: _Run) -> Any:
        """Return a stage that does the same as one of the pipeline, in the same order each time."""
        stage, (rank, _, worker, _) = self.pipeline[number], pytorch_worker_info()
        kind = _kind(stage)
        # All readers must see one order of what is divided among them later.
        later = {_kind(later_stage) for later_stage in self.pipeline[number:]}
        rank = 0 if shardlists.split_by_node in later else rank
        worker = 0 if shardlists.split_by_worker in later else worker
        drawn = self._seed, run.epoch, run.passes, rank, worker, number
        seed, turn = crc32(repr(drawn).encode()), run.epoch * self.repetitions + run.passes
        if self.repetitions == sys.maxsize:  # of `with_epoch`: a seed has fewer bits
            turn = crc32(repr((run.epoch, run.passes)).encode())
        if kind in _SHUFFLES:
            options = _shuffle_of(stage)
            if (given := options.pop("seed", None)) is not None:
                seed = given + stage.epoch + 1 + turn if kind is filters.detshuffle else given
            rng = _Draws(seed)
            return FilterFunction(filters.shuffle.f, **{**options, "rng": rng})
        if kind is shardlists.ResampledShards:
            stage = copy.copy(stage)
            if not stage.deterministic:
                stage.deterministic, stage.worker_seed = True, lambda: seed
            stage.epoch += turn
        elif kind is filters.batched.f:
            return FilterFunction(_batched, *stage.args, **stage.kw)
        return stage

    def _stage_positions(self) -> tuple[int, int, bool]:
        """Return two positions, and whether the number of places that were read makes a state.

        They are those of the stage that opens shards, and of the first stage that gets samples.
        """
        for stage in self.pipeline:
            _refuse(stage)
        kinds = [_kind(stage) for stage in self.pipeline]
        read = opener = kinds.index(wds.url_opener)
        options, *others = map(_options_of, self.pipeline[opener : opener + 3])
        self._cache = options.pop("cache")  # of the last `attach`
        readers = [wds.tar_files, wds.group_files]
        is_plain = others == [options] * 2 and kinds[opener + 1 :][:2] == readers
        read += 3 if is_plain else 1
        while is_plain and read < len(kinds) and kinds[read] in _BLIND:
            read += 1
        held = [stage for stage in self.pipeline[read:] if _kind(stage) not in _DIRECT]
        if held and wds.is_new("replay", self._cache):
            logger.warning(
                "%s gets samples, not places. It may hold some back in memory, so resuming an "
                "epoch reads its samples again. Put shuffles before all filters that look at "
                "samples, and use WebDataset's own filters.",
                _shown(held[0]),
            )
        return opener, read, is_plain and not held


_logs: weakref.WeakSet[_EpochLog] = weakref.WeakSet()
# A forked worker must find the log of its parent, which may be a forked child itself.
os.register_at_fork(before=lambda: [each.add() for each in list(_logs)])


def _workers_of(state: Mapping[str, Any]) -> list[Any]:
    """Return the state of each worker that had started."""
    workers = state.get("workers")
    return [w for w in workers if w is not None] if isinstance(workers, list) else [state]


def _loader() -> str:
    """Return a name of the iterator over a DataLoader for which this worker works."""
    with contextlib.suppress(AttributeError, IndexError):
        # All workers write to this pipe. Another loader may have had the same seed.
        queue = multiprocessing.current_process()._args[3]  # type: ignore[attr-defined]
        return str(os.fstat(queue._writer.fileno()).st_ino)
    info: Any = get_worker_info()  # of another class of loaders
    return str(info.seed - info.id)


def _collated(collate: Any, pipeline: Resumable, outputs: Any) -> tuple[dict[str, Any], Any]:
    """Collate outputs in the process that has read them. Return the position behind them, too."""
    _, _, worker, workers = pytorch_worker_info()
    return {**vars(pipeline._run), "worker": worker, "workers": workers}, collate(outputs)


def _batched(data: Iterable[Any], *args: Any, **options: Any) -> Iterator[Any]:
    """Yield the batches of WebDataset's filter, which takes one more sample before it does so."""
    bound = inspect.signature(filters.batched.f).bind(iter(data), *args, **options)
    bound.apply_defaults()
    samples, size, collate, is_partial_kept = bound.args
    while batch := list(islice(samples, size)):
        if len(batch) == size or is_partial_kept:
            yield batch if collate is None else collate(batch)


def _other_count(url: str, now: int, before: object) -> ConfigError:
    text = "when this epoch began, so its order has changed. Start the epoch again."
    return ConfigError(f"{shown_url(url)} has {now} samples, but had {before} {text}")


class _Shards:
    """The shards of one pass. One with places that were not read is open, so it is not evicted."""

    def __init__(self, cache: Cache, run: _Run, stages: list[Any], total: int) -> None:
        self._cache, self._run, self._total = cache, run, total
        self._shard_of = partial(wds.shard_of, cache)
        self._handler = _options_of(stages[0])["handler"]
        self.is_plain = len(stages) > 1  #: otherwise, the pipeline's own stages get the shards
        self._buffered = sum(_shuffle_of(stage).get("bufsize", 0) for stage in stages)
        # By number of the shard: its URL, its samples, and how many of them were not read yet.
        self._urls, self._counts, self._left = list[str](), list[int](), list[int]()
        self._opened = OpenShards()
        self._failed = dict[int, ShardCacheError]()  # why a shard could not be opened again
        self._bytes = 0  # read, but not counted yet

    def _handle(self, exn: Exception, what: str = "samples") -> bool:
        if self._handler(exn):
            return True
        self._run.end(what)
        return False

    def _skip(self, exn: Exception) -> bool:
        self._enter("", "0", shown=exn.args[-1])
        return self._handle(exn, "shards")

    def places(self, data: Iterable[Any]) -> Iterator[Any]:
        """Yield places, and the samples of shards that cannot be read at random. A stage."""
        items, run = iter(data), self._run
        counts, check = run.list_again()
        pairs = zip(counts, items, strict=False)
        urls = ((c, item, item["url"] if isinstance(item, dict) else item) for c, item in pairs)
        known = [(count, item, self._enter(url, count)) for count, item, url in urls]
        if run.check != check or len(known) < len(counts):
            raise ConfigError(
                "the shards come in another order than when the state was saved, so the stages "
                "before the archives do not repeat it. Use WebDataset's own stages there."
            )
        if not run.entered:
            self._want()
        for count, item, places in known:
            yield from places
            if "~" in count and count != "~0":
                source = next(wds.url_opener([item], cache=self._cache))
                yield from self._streamed(source, count[1:])
        for source in () if run.ended else wds.url_opener(items, self._skip, cache=self._cache):
            if (opened := self._indexed(source)) is not None:
                yield from self._enter(source["url"], str(len(opened)), opened)
            else:
                self._enter(source["url"], "~")
                yield from self._streamed(source)
            if run.ended:
                return
            del opened, source  # only `_opened` keeps the shard open

    def _streamed(self, source: dict[str, Any], count: str = "") -> Iterator[Any]:
        """Yield the samples of a shard, as many as a state says; for other readers, the shard."""
        given, is_over = 0, True

        def only() -> Iterator[dict[str, Any]]:
            nonlocal is_over
            yield source
            is_over = False  # the handler goes on with the next shard

        samples = wds.tar_samples(only(), self._handler) if self.is_plain else only()
        for sample in islice(samples, int(count) if count else None):
            given += 1
            yield sample
        if not count:
            self._run.counted(given)
            if is_over:
                self._run.end("shards")
        elif given < int(count):
            raise _other_count(source["url"], given, count)

    def _enter(self, url: str, count: str, opened: Any = None, shown: str = "") -> range:
        """Note a shard in the state. Return the places in it."""
        number, places = len(self._urls), int(count) if count.isdigit() else 0
        self._urls.append(url)
        self._counts.append(places)
        self._left.append(places)
        self._run.enter(shown or shown_url(url), count)
        if opened is not None and places:
            self._keep(number, opened)
            self._warn_of_room(opened)
        return range(number << _BITS, (number << _BITS) + places)

    def _keep(self, number: int, opened: OpenShard) -> None:
        self._opened.make_room()
        self._opened[number] = opened

    def _warn_of_room(self, opened: OpenShard) -> None:
        if self._buffered and opened.is_cached:
            # The last of n samples leaves a buffer of B after about B * ln(n) others came.
            shards = self._buffered / len(opened) * (1 + math.log(len(opened)))
            readers = pytorch_worker_info()[3] * (detect().local_size or 1)
            needed = readers * (math.ceil(shards) + self._cache.config.prefetch + 1)
            warn_of_room(self._cache, min(needed, self._total), opened.size)
            self._buffered = 0

    def _indexed(self, source: dict[str, Any]) -> OpenShard | None:
        """Open a shard for random access, or leave a stream of it in ``source``."""
        stream, shard = source["stream"], self._shard_of(source)
        if not self.is_plain:
            return None
        try:
            if isinstance(stream.raw, ShardStream):
                stream.raw.wait(complete=True)
            stream.fileno()
        except (ShardCacheError, UnsupportedOperation, system_error()):
            return None  # it is not stored, or a read raises the same error
        try:
            return OpenShard(self._cache, shard, stream)
        except (ShardCacheError, system_error()):  # it is compressed or incomplete
            source["stream"] = open_shard(self._cache.process, shard)
            return None

    def read(self, places: Iterator[Any]) -> Iterator[Any]:
        """Yield the samples at places. A stage."""
        run = self._run
        if run.entered:  # in a state
            for place in islice(places, run.entered):
                if type(place) is int:
                    self._left[place >> _BITS] -= 1
            self._want()
            if run.ended == "samples":
                return
        for place in places:
            run.entered += 1
            try:
                sample = self._sample(place) if type(place) is int else place
            except ConfigError:
                raise
            except Exception as exn:  # noqa: BLE001 - the handler decides
                self._opened.pop(place >> _BITS, None)  # it is opened again for its next sample
                if not self._handle(exn):
                    return
                continue
            yield sample
            if run.ended == "samples":
                return
        self._count()

    def _want(self) -> None:
        """Begin to download all shards that have unread samples."""
        self._ahead = Prefetcher(self._cache.process)
        needed = [url for url, left in zip(self._urls, self._left, strict=True) if left]
        self._ahead.want(map(self._shard_of, needed))

    def _sample(self, place: int) -> dict[str, Any]:
        number, index = divmod(place, 1 << _BITS)
        self._left[number] -= 1
        opened = self._opened.get(number)
        if opened is None or opened.is_lost:
            url, count = self._urls[number], self._counts[number]
            if (failed := self._failed.get(number)) is not None:
                raise type(failed)(failed.message, url=shown_url(url))
            try:
                opened = OpenShard(self._cache, self._shard_of(url))
            except ShardCacheError as exn:
                self._failed[number] = type(exn)(exn.message)  # a copy without the traceback
                raise
            if len(opened) != count:
                raise _other_count(url, len(opened), count)
            self._keep(number, opened)
        if not self._left[number]:
            del self._opened[number]
        sample = {**opened.sample(index, self._handle), "__url__": self._urls[number]}
        if opened.is_cached:  # otherwise, its stream counts
            self._bytes += opened.offsets[index + 1] - opened.offsets[index]
        if self._bytes >= _COUNTED:
            self._count()
        return sample

    def _count(self) -> None:
        self._cache.process.counters.read(self._bytes)
        self._bytes = 0

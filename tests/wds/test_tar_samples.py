"""Our stages yield what WebDataset's yield: samples, calls of handlers, exceptions."""

from __future__ import annotations

import functools
import inspect
import io
import pickle
import random
import tarfile
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import webdataset as wds
from hypothesis import example, given, settings
from hypothesis import strategies as st
from webdataset import tariterators
from webdataset.filters import FilterFunction, pipelinefilter

from shardcache import Cache
from shardcache.wds.samples import (
    FastTar,
    _base_plus_ext,
    _is_meta,
    quicken,
    restore,
    tar_files,
    tar_samples,
)
from tests.support.fakes import MemoryOrigin
from tests.support.tars import make_tar
from tests.wds.archives import BLOCK, FORMATS, EndlessError, OnlyRead, archive, damaged

MakeCache = Callable[..., Cache]
SEEDS = st.integers(0, 2**32)
NAMES = (
    "a.jpg", "a.JPG", "a.cls", "b.jpg", "b.cls", "c/d.e.f", "c/d.txt", "c.x/d.txt", "noext", "dir/",
    "__meta__", "__meta__/a.jpg", "__url__.txt", "a.__key__", "b.__bad__", "d.__local_path__",
    "d.txt", "e.__url__", "./f.txt", "./f.", ".g", "h/.i", "n\u00e4me.txt", "two\nlines.txt", "_.x",
)  # fmt: skip


class Stream(OnlyRead):
    """Told apart by its number, not by its address."""

    def __init__(self, number: int, data: bytes) -> None:
        super().__init__(data)
        self.number = number

    def __repr__(self) -> str:
        return f"<stream {self.number}>"


def shard(rng: random.Random) -> bytes:
    """Files whose names make samples, good ones and others."""
    if rng.random() < 0.1:
        return damaged(rng, archive(rng))
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=rng.choice(FORMATS)) as tar:
        for _ in range(rng.choice((0, 1, 4, 9, 20))):
            info = tarfile.TarInfo(rng.choice(NAMES))
            info.size = rng.choice((0, 3, 600))
            info.mtime = rng.choice((1, 1.5))
            if rng.random() < 0.1:
                info.type, info.size = tarfile.DIRTYPE, 0
            tar.addfile(info, io.BytesIO(rng.randbytes(info.size)))
        end = made.tell()
    data = made.getvalue()[: end + rng.choice((0, BLOCK, 2 * BLOCK))]
    return damaged(rng, data) if rng.random() < 0.4 else data


class Run:
    """One way through some shards, and all that can be seen of it."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.shards = [shard(rng) for _ in range(rng.choice((1, 1, 3)))]
        self.local = rng.random() < 0.5
        self.answers = rng.choice(((True,), (True, True, False), (False,), ()))
        self.options: dict[str, Any] = {}
        if rng.random() < 0.3:
            self.options["select_files"] = rng.choice((_select, _select_badly))
        if rng.random() < 0.3:
            self.options["rename_files"] = rng.choice((_rename, _rename_badly))
        if rng.random() < 0.3:
            self.options["eof_value"] = rng.choice((None, {}))
        self.grouping: dict[str, Any] = {}
        if rng.random() < 0.3:
            self.grouping["lcase"] = False
        if rng.random() < 0.3:
            self.grouping["suffixes"] = {"jpg", "txt"}
        if rng.random() < 0.2:
            self.grouping["keys"] = rng.choice((_keys, tariterators.base_plus_ext))

    def sources(self) -> Iterator[dict[str, Any]]:
        for number, data in enumerate(self.shards):
            source: dict[str, Any] = {"url": f"u{number}", "stream": Stream(number, data)}
            if self.local:
                source["local_path"] = f"/p{number}"
            yield source

    def seen(self, stages: Callable[[Any, Any, Any], Iterable[Any]]) -> list[Any]:
        """Whatever comes out of ``stages(sources, file handler, group handler)``, in order."""
        seen: list[Any] = []

        def handler(level: str) -> Callable[[Exception], bool]:
            answers = iter(self.answers * 9)

            def handle(exn: Exception) -> bool:
                seen.append((level, type(exn), repr(exn.args)))
                answer = next(answers, None)
                if answer is None:
                    raise exn
                return answer

            return handle

        try:
            for sample in stages(self.sources(), handler("files"), handler("groups")):
                seen.append(list(sample.items()))
        except Exception as exn:
            seen.append((type(exn), repr(exn.args)))
        return seen


def _select(name: str) -> bool:
    return not name.endswith(".cls")


def _select_badly(name: str) -> bool:
    if name == "b.cls":
        raise KeyError("no colour", 7)
    return True


def _rename(name: str) -> str:
    return name.replace("a.", "z/y.")


def _rename_badly(name: str) -> str:
    if name == "a.cls":
        raise RuntimeError
    return name


def _keys(name: str) -> tuple[Any, Any]:
    if name == "b.jpg":
        return "b", None  # has no lower case
    return tariterators.base_plus_ext(name)


def judge(ours: list[Any], theirs: list[Any]) -> None:
    """The same; as far as tarfile came, where a damaged size has it read on for minutes."""
    endless = [n for n, event in enumerate(theirs) if EndlessError in event]
    if not endless:
        assert ours == theirs
        return
    last = endless[0]
    assert ours[:last] == theirs[:last]
    assert {tarfile.ReadError, EndlessError}.intersection(ours[last])


# -- the same as WebDataset ----------------------------------------------------------


@given(seed=SEEDS)
@example(seed=84466)  # a size that tarfile believes
@settings(max_examples=400, deadline=None)
def test_files_and_samples_are_those_of_webdatasets_expander_and_grouper(seed: int) -> None:
    run = Run(seed)

    def expanded(data: Any, files: Any, _: Any = None) -> Iterable[Any]:
        return tariterators.tar_file_expander(data, files, **run.options)

    def grouped(data: Any, files: Any, groups: Any) -> Iterable[Any]:
        found = expanded(data, files)
        return tariterators.group_by_keys(found, handler=groups, **run.grouping)

    def ours(data: Any, files: Any, groups: Any) -> Iterable[Any]:
        return tar_samples(data, files, **run.options, **run.grouping, group_handler=groups)

    judge(run.seen(ours), run.seen(grouped))
    judge(run.seen(lambda data, h, _: tar_files(data, h, **run.options)), run.seen(expanded))


@given(name=st.text("ab./_\n-A\u00e4", max_size=12))
@example("a/.b")
@example("a.b\n")
@settings(max_examples=500, deadline=None)
def test_names_are_split_and_left_out_as_by_webdataset(name: str) -> None:
    assert _base_plus_ext(name) == tariterators.base_plus_ext(name)
    theirs = inspect.signature(tariterators.tar_file_iterator).parameters["skip_meta"].default
    assert _is_meta.__self__.pattern == theirs


# -- in pipelines ----------------------------------------------------------------------

SPEC = "s3://lab/train-{0000..0002}.tar"


@pytest.fixture(autouse=True)
def _objects(origin: MemoryOrigin) -> Iterator[None]:
    for seed in range(3):
        origin.objects[f"s3://lab/train-{seed:04d}.tar"] = make_tar(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def fast(dataset: Any) -> list[FastTar]:
    return [stage for stage in dataset.pipeline if isinstance(stage, FastTar)]


def test_attach_makes_one_fast_stage_of_the_two_and_can_undo_it(make_cache: MakeCache) -> None:
    cache = make_cache()
    cache.prewarm(SPEC)  # or samples have no path of their shard the first time
    stock = cache.attach(wds.WebDataset(SPEC, shardshuffle=False), fast_tar=False)
    ours = cache.attach(wds.WebDataset(SPEC, shardshuffle=False))
    before = [getattr(stage, "f", None) for stage in stock.pipeline]
    assert tariterators.tar_file_expander in before
    assert not fast(stock)
    assert len(fast(ours)) == 1
    assert len(ours.pipeline) == len(stock.pipeline) - 1
    expected = [list(sample.items()) for sample in stock]
    assert len(expected) == 12
    assert [list(sample.items()) for sample in ours] == expected
    again = pickle.loads(pickle.dumps(cache.attach(ours)))
    assert len(fast(again)) == 1
    assert [list(sample.items()) for sample in again] == expected
    cache.attach(ours, fast_tar=False)
    assert [getattr(stage, "f", None) for stage in ours.pipeline] == before


def test_arguments_of_the_stages_are_kept(make_cache: MakeCache, origin: MemoryOrigin) -> None:
    origin.objects["s3://lab/train-0001.tar"] = b"junk" * 500
    told: list[Exception] = []
    dataset = wds.WebDataset(
        SPEC,
        shardshuffle=False,
        handler=lambda exn: told.append(exn) or True,
        select_files=lambda name: name.endswith("txt"),
        rename_files=lambda name: f"x/{name}",
    )
    samples = list(make_cache().attach(dataset))
    assert len(fast(dataset)) == 1
    assert len(told) == 1
    assert "cls" not in samples[0]
    assert samples[0]["__key__"] == "x/0000-00000"
    assert len(samples) == 8


def test_stages_that_are_not_webdatasets_own_stay() -> None:
    def mine(data: Any) -> Any:
        return tariterators.tar_file_expander(data)

    expand = pipelinefilter(tariterators.tar_file_expander)
    group = pipelinefilter(tariterators.group_by_keys)
    unknown = FilterFunction(tariterators.tar_file_expander, colour="red")
    for stages in ([mine, group()], [unknown, group()], [group()], [lambda data: data]):
        pipeline = list(stages)
        quicken(pipeline)
        assert pipeline == stages
    for files in (tariterators.tar_file_expander, expand(handler=_select), expand(_select)):
        for groups in (tariterators.group_by_keys, group(lcase=False), group(_keys)):
            pipeline = [files, groups]
            quicken(pipeline)
            assert len(pipeline) == 1
            assert pipeline[0].stock == [files, groups]
            restore(pipeline)
            assert pipeline == [files, groups]
    pipeline = [functools.partial(tariterators.tar_file_expander, eof_value={"end": 1}), group()]
    quicken(pipeline)
    assert isinstance(pipeline[0], FastTar) and pipeline[0].groups is None
    assert isinstance(pipeline[1], FilterFunction)


def test_a_hand_made_pipeline_takes_the_stage_as_it_is(make_cache: MakeCache) -> None:
    cache = make_cache()
    cache.prewarm(SPEC)
    expand, group = tariterators.tar_file_expander, tariterators.group_by_keys
    stock, grouped, expanded = (
        list(wds.DataPipeline(wds.SimpleShardList(SPEC), cache.url_opener, *stages))
        for stages in ([expand, group], [tar_samples], [tar_files, group])
    )
    assert grouped == expanded == stock
    combined = wds.DataPipeline(wds.SimpleShardList(SPEC), wds.tarfile_to_samples())
    assert list(cache.attach(combined)) == stock
    assert list(cache.attach(combined, fast_tar=False)) == stock


def test_no_more_than_one_shard_is_held_when_the_next_is_opened() -> None:
    alive: list[weakref.ref[Stream]] = []
    counts = []

    def opened() -> Iterator[dict[str, Any]]:
        for number in range(4):
            counts.append(sum(ref() is not None for ref in alive))
            stream = Stream(number, make_tar(number))
            alive.append(weakref.ref(stream))
            source = {"url": "u", "stream": stream}
            del stream
            yield source
            del source

    assert len(list(tar_samples(opened()))) == 16
    assert max(counts) <= 1

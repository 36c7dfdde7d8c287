"""Our stage yields what WebDataset's yields: files, calls of handlers, exceptions."""

from __future__ import annotations

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
from shardcache.wds import tar_files, tar_samples
from tests.support.fakes import MemoryOrigin
from tests.support.tars import make_tar
from tests.wds.archives import BLOCK, FORMATS, EndlessError, OnlyRead, archive, damaged

MakeCache = Callable[..., Cache]
NAMES = (
    "a.jpg", "a.JPG", "a.cls", "b.jpg", "b.cls", "c/d.e.f", "c/d.txt", "c.x/d.txt", "noext", "dir/",
    "__meta__", "__meta__/a.jpg", "__url__.txt", "a.__key__", "b.__bad__", "d.__local_path__",
    "d.txt", "e.__url__", "./f.txt", "./f.", ".g", "h/.i", "n\u00e4me.txt", "two\nlines.txt", "_.x",
    "__", "__a", "a__", "__/b", "__a__b", "x/__c__",
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
            self.options["eof_value"] = rng.choice((None, {}, {"end": 1}))

    def sources(self) -> Iterator[dict[str, Any]]:
        for number, data in enumerate(self.shards):
            source: dict[str, Any] = {"url": f"u{number}", "stream": Stream(number, data)}
            if self.local:
                source["local_path"] = f"/p{number}"
            yield source

    def seen(self, stage: Callable[..., Iterable[Any]]) -> list[Any]:
        """What comes out of ``stage``, and what its handler is asked, in order."""
        seen: list[Any] = []
        answers = iter(self.answers * 9)

        def handler(exn: Exception) -> bool:
            seen.append((type(exn), repr(exn.args)))
            answer = next(answers, None)
            if answer is None:
                raise exn
            return answer

        try:
            for sample in stage(self.sources(), handler, **self.options):
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


@given(seed=st.integers(0, 2**32))
@example(seed=84466)  # a size that tarfile believes
@settings(max_examples=150, deadline=None)
def test_files_are_those_of_webdatasets_expander(seed: int) -> None:
    run = Run(seed)
    ours, theirs = run.seen(tar_files), run.seen(tariterators.tar_file_expander)
    # A damaged size can have tarfile read on for minutes: then, as far as it came.
    endless = [n for n, event in enumerate(theirs) if EndlessError in event]
    last = endless[0] if endless else None
    assert ours[:last] == theirs[:last]
    assert last is None or {tarfile.ReadError, EndlessError}.intersection(ours[last])


# -- in pipelines ----------------------------------------------------------------------

SPEC = "s3://lab/train-{0000..0002}.tar"


@pytest.fixture(autouse=True)
def _objects(origin: MemoryOrigin) -> Iterator[None]:
    for seed in range(3):
        origin.objects[f"s3://lab/train-{seed:04d}.tar"] = make_tar(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def functions(dataset: Any) -> list[Any]:
    return [getattr(stage, "f", stage) for stage in dataset.pipeline]


def test_attach_replaces_the_expander_and_keeps_its_arguments(
    make_cache: MakeCache, origin: MemoryOrigin
) -> None:
    cache = make_cache()
    cache.prewarm(SPEC)  # or samples have no path of their shard the first time
    stock = cache.attach(wds.WebDataset(SPEC, shardshuffle=False), fast_tar=False)
    ours = cache.attach(wds.WebDataset(SPEC, shardshuffle=False))
    assert tariterators.tar_file_expander in functions(stock)
    assert tar_files in functions(ours)
    expected = [list(sample.items()) for sample in stock]
    again = pickle.loads(pickle.dumps(cache.attach(ours)))
    assert len(expected) == 12
    for each in (ours, again):
        assert [list(sample.items()) for sample in each] == expected

    cache.remove("s3://lab/train-0001.tar")
    origin.objects["s3://lab/train-0001.tar"] = b"junk" * 500
    told: list[Exception] = []
    dataset = wds.WebDataset(
        SPEC,
        shardshuffle=False,
        handler=lambda exn: told.append(exn) or True,
        select_files=lambda name: name.endswith("txt"),
        rename_files=lambda name: f"x/{name}",
    )
    samples = list(cache.attach(dataset))
    assert len(told) == 1 and len(samples) == 8
    assert "cls" not in samples[0] and samples[0]["__key__"] == "x/0000-00000"


def test_stages_that_are_not_webdatasets_own_stay(make_cache: MakeCache) -> None:
    def mine(data: Any) -> Any:
        return tariterators.tar_file_expander(data)

    expand = pipelinefilter(tariterators.tar_file_expander)
    for stage, is_replaced in (
        (mine, False),
        (FilterFunction(mine), False),
        (tariterators.tar_file_expander, True),
        (expand(handler=wds.ignore_and_continue), True),
        (expand(wds.ignore_and_continue, _select), True),
    ):
        pipeline = wds.DataPipeline(wds.SimpleShardList(SPEC), tariterators.url_opener, stage)
        make_cache().attach(pipeline)
        assert (functions(pipeline)[-1] is tar_files) is is_replaced


def test_a_hand_made_pipeline_takes_the_stage_as_it_is(make_cache: MakeCache) -> None:
    cache = make_cache()
    cache.prewarm(SPEC)
    expand, group = tariterators.tar_file_expander, tariterators.group_by_keys
    stock, grouped, expanded = (
        list(wds.DataPipeline(wds.SimpleShardList(SPEC), cache.url_opener, *stages))
        for stages in ([expand, group], [tar_samples], [tar_files, group])
    )
    assert grouped == expanded == stock
    for is_fast in (False, True):
        combined = wds.DataPipeline(wds.SimpleShardList(SPEC), wds.tarfile_to_samples())
        assert list(cache.attach(combined, fast_tar=is_fast)) == stock


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

"""`Cache.attach(..., resume=True)`: a pipeline gives the samples of a stock one, and resumes."""

import copy
import gc
import gzip
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle, islice, permutations, product

import pytest
import torch
import webdataset as wds
from torch.utils.data import ChainDataset, DataLoader
from webdataset import tariterators

from shardcache import ConfigError, ShardNotFoundError
from tests.support import caches
from tests.support.storetools import together
from tests.support.tars import sample_tar, tar_of
from tests.support.trainingtools import keys
from tests.wds.test_tar_files import BEFORE_1_0

pytestmark = pytest.mark.filterwarnings("ignore")
URLS = [f"s3://lab/{n}.tar" for n in range(8)]
KEYS = [f"{shard:04d}-{n:05d}" for shard in range(8) for n in range(10 + shard)]
#: Arguments that WebDataset has since 1.0; before, its seed is an attribute.
OPTIONS = {} if BEFORE_1_0 else {"seed": 7, "empty_check": False}
#: Errors are skipped, and the shards come in their order.
SKIP = {"handler": wds.ignore_and_continue, "shardshuffle": False}
RANDOM_PIPELINES = 12 if os.environ.get("FUZZ", "1") == "1" else 300


@pytest.fixture(autouse=True)
def _objects(origin, monkeypatch):
    monkeypatch.setattr("shardcache.wds._logged", set())
    origin.objects |= {url: sample_tar(n, 10 + n) for n, url in enumerate(URLS)}


@pytest.fixture
def make(make_cache):
    """Make a pipeline over all shards, with these filters, in a cache with these options."""

    def make(*stages, resume=True, urls=URLS, cache=None, **options):
        options = {"shardshuffle": 100, "nodesplitter": wds.split_by_node, **OPTIONS, **options}
        dataset = wds.WebDataset(urls, **options)
        dataset.seed = 7
        return (cache or make_cache()).attach(dataset, resume=resume).compose(*stages)

    return make


@pytest.fixture
def of_files(make, open_cache, tmp_path):
    """Make a pipeline over four local shards, which worker processes can read, too."""
    paths = [tmp_path / f"{number}.tar" for number in range(4)]
    for number, path in enumerate(paths):
        path.write_bytes(sample_tar(number, 10 + number))
    return lambda *stages: make(*stages, urls=[*map(str, paths)], cache=open_cache())


def key_of(sample):
    return sample["__key__"]


def saved(dataset):
    return json.loads(json.dumps(dataset.state_dict()))


def handed_over(one, two, at):
    """Return the first outputs of a pipeline, and those of another, which continues from there."""
    first = list(islice(one, at))
    two.load_state_dict(saved(one))
    two.load_state_dict(saved(two))  # before the first sample, it is the same
    return first, list(two)


def resumed(make, *stages, at=40, **options):
    """Check that a new pipeline continues an epoch, and the following one; return a state."""
    dataset, other = (make(*stages, **options) for _ in range(2))
    whole = [list(dataset), list(dataset)]
    dataset.set_epoch(0)
    first, rest = handed_over(dataset, other, at)
    assert [first + rest, list(other)] == whole
    other.set_epoch(0)
    assert list(other) == whole[0]  # the state was continued once
    return saved(dataset)


# -- equality with WebDataset's own pipelines ---------------------------------------


def is_odd(sample):
    return len(sample["__key__"] + sample.get("txt", b"").decode()) % 2


def held_back(samples):
    """A filter that holds samples back, of which shardcache knows nothing."""
    before = list(islice(samples, 3))
    for sample in samples:
        yield before.pop(0)
        before.append(sample)
    yield from before


class HeldBack:
    def __call__(self, samples):
        return held_back(samples)


def random_pipeline(seed, make, cache, resume):
    """Return a pipeline, and whether its samples and their order are those of WebDataset."""
    draw = random.Random(seed)
    sizes = [1, 3, 1000]
    kinds = {
        "shuffle": lambda: wds.shuffle(draw.choice(sizes), draw.choice(sizes), None),
        "detshuffle": lambda: wds.detshuffle(draw.choice(sizes), seed=draw.randrange(3)),
        "select": lambda: wds.select(is_odd),
        "rename": lambda: wds.rename(text="txt;bin", keep=True, handler=wds.ignore_and_continue),
        "own": lambda: held_back,
        "slice": lambda: wds.slice(draw.randrange(40)),
    }
    chosen = draw.choices([*kinds], [6, 2, 2, 1, 1, 1], k=draw.randrange(5))
    options = {"shardshuffle": draw.choice([False, 4]), "handler": wds.ignore_and_continue}
    stages, is_partial = [kinds[kind]() for kind in chosen], draw.random() < 0.7
    if draw.random() < 0.5:
        stages += [wds.batched(draw.randrange(1, 6), collation_fn=None, partial=is_partial)]
    dataset = make(*stages, resume=resume, cache=cache, **options)
    repeat = draw.choice(["once", "once", "repeat", "once" if BEFORE_1_0 else "with_epoch"])
    if repeat == "repeat":
        dataset = dataset.repeat(2)
    elif repeat == "with_epoch":
        dataset = dataset.with_epoch(draw.randrange(1, 60))
    is_shuffled = options["shardshuffle"] or {*chosen} & {"shuffle", "detshuffle"}
    is_cut = repeat == "with_epoch" or "slice" in chosen or not is_partial
    return dataset, not (is_shuffled and is_cut), not is_shuffled


def seen(outputs):
    """Return samples without what differs when a shard was downloaded in the meantime."""
    samples = [each for one in outputs for each in (one if isinstance(one, list) else [one])]
    return [sorted({**each, "__local_path__": ""}.items()) for each in samples]


@pytest.mark.parametrize("seed", range(RANDOM_PIPELINES))
def test_a_random_pipeline_equals_stock_and_resumes(make, make_cache, origin, seed, set_variables):
    draw = random.Random(f"shards {seed}")
    cache = make_cache(max_size=draw.choice([None, 30_000]))
    for number, url in enumerate(URLS):
        files = [(f"{number}-{n}.{draw.choice(['txt', 'bin'])}", b"%d" % n * n) for n in range(12)]
        data = tar_of(files[: draw.randrange(12)])
        forms = [data, data, data, gzip.compress(data), data[: len(data) // 3 // 512 * 512 + 99]]
        origin.objects[url] = draw.choice(forms)
    del origin.objects[draw.choice(URLS)]
    workers = draw.randrange(1, 4)
    for worker in range(workers):
        set_variables(NUM_WORKERS=workers, WORKER=worker)
        stock, is_equal, is_ordered = random_pipeline(seed, make, cache, resume=False)
        expected, (dataset, *_) = seen(stock), random_pipeline(seed, make, cache, resume=True)
        epochs = [list(dataset) for _ in range(3)]
        for epoch in epochs if is_equal else []:
            found = seen(epoch)
            assert found == expected if is_ordered else sorted(found) == sorted(expected)
        at = draw.randrange(len(epochs[1]) + 1)
        dataset.set_epoch(1)
        other, *_ = random_pipeline(seed, make, cache, resume=True)
        first, rest = handed_over(dataset, other, at)
        assert seen(first + rest) == seen(epochs[1])
        assert seen(other) == seen(epochs[2])


# -- the order --------------------------------------------------------------------


def test_the_order_of_each_epoch_is_a_promise(make):
    dataset = make(wds.shuffle(5), wds.detshuffle(3, seed=2), urls=URLS[:2])
    assert [keys(dataset)[:6] for _ in range(2)] == [
        ["0000-00003", "0000-00004", "0000-00006", "0000-00005", "0000-00000", "0000-00009"],
        ["0001-00000", "0001-00007", "0001-00008", "0001-00006", "0001-00005", "0000-00000"],
    ]
    resampled = make(resampled=True, shardshuffle=False).with_epoch(300)
    first, second = keys(resampled), keys(resampled)
    resampled.set_epoch(0)
    assert keys(resampled) == first != second
    twice = make(wds.detshuffle(99, seed=2), urls=URLS[:1]).repeat(2)
    epochs = keys(twice), keys(twice)
    half = len(epochs[0]) // 2
    assert len({tuple(part) for epoch in epochs for part in (epoch[:half], epoch[half:])}) == 4


def test_an_epoch_of_drawn_shards_repeats_no_pass_of_the_epoch_before(make_cache):
    shards = wds.ResampledShards(URLS, nshards=2, deterministic=True)
    drawn = wds.DataPipeline(shards, wds.tarfile_to_samples()).with_epoch(200)
    drawn = make_cache().attach(drawn, resume=True)
    first, second = ([each["__key__"] for each in drawn] for _ in range(2))
    assert not any(second[:60] == first[at:][:60] for at in range(140))


SPLITS = wds.shuffle(100), wds.split_by_node, wds.shuffle(100), wds.split_by_worker


@pytest.mark.parametrize(
    "stages",
    [
        (*SPLITS, wds.tarfile_to_samples(), wds.shuffle(9)),
        (wds.shuffle(100), wds.tarfile_to_samples(), *SPLITS),
    ],
)
def test_what_is_shuffled_before_it_is_divided_goes_to_one_reader(
    make_cache, set_variables, stages
):
    epochs = [[], []]
    for rank, worker in product((0, 1), (0, 1)):
        set_variables(RANK=rank, WORLD_SIZE=2, WORKER=worker, NUM_WORKERS=2)
        parts = wds.SimpleShardList(URLS), *stages
        dataset = make_cache().attach(wds.DataPipeline(*parts), resume=True)
        for epoch in epochs:
            epoch += keys(dataset)
    assert epochs[0] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1]) == KEYS


# -- without reading ----------------------------------------------------------------


def test_resuming_reads_only_what_is_left(make, make_cache, origin):
    cache = make_cache()
    state = resumed(make, wds.shuffle(12), wds.batched(4, collation_fn=None), at=15, cache=cache)
    assert len(json.dumps(state)) < 1000
    cache.clean(everything=True)
    origin.requests.clear()
    other = make(wds.shuffle(12), wds.batched(4, collation_fn=None), cache=cache)
    other.load_state_dict(state)
    left = {each["__url__"] for batch in other for each in batch}
    assert {url for url, *_ in origin.requests} == left < {*URLS}
    assert origin.fetches == len(left)


def test_shards_stay_until_the_buffer_names_them_no_more(make, make_cache, origin):
    cache = make_cache(prefetch=0)
    samples = iter(make(cache=cache, shardshuffle=False))
    assert keys(islice(samples, 50)) == KEYS[:50]  # all of four shards, some of the fifth
    cache.clean(everything=True)  # as another process evicts
    assert [entry.name() for entry in cache.entries()] == [URLS[4]]
    samples = iter(make(wds.shuffle(1000, initial=1000), cache=cache))
    found = [next(samples)]
    cache.clean(everything=True)
    origin.objects.clear()
    assert sorted(keys(found + list(samples))) == KEYS
    assert cache.stats().bytes_opened > 108 * 2048


def test_too_small_a_cache_is_said_with_the_size_that_it_needs(make, make_cache, caplog):
    samples = list(make(wds.shuffle(1000), cache=make_cache(max_size=100_000)))
    assert sorted(keys(samples)) == KEYS
    (text,) = [each for each in caches.warnings(caplog) if "shards at a time" in each]
    assert "may hold 100.0 KB, but this node uses 8 shards at a time" in text
    resumed(make, wds.shuffle(1000), wds.map(key_of), cache=make_cache(max_size=100_000))


@pytest.mark.parametrize("stages", [(wds.map(dict), wds.shuffle(9)), (held_back,)])
def test_filters_that_need_samples_early_are_said_once(make, caplog, stages):
    assert list(make(wds.xdecode(("*.cls", str)), wds.extract_keys("*cls")))
    resumed(make, *stages)
    (text,) = caches.warnings(caplog)
    assert ("shuffle(9)" if stages[1:] else "held_back") + " gets samples, not places" in text


# -- errors ------------------------------------------------------------------------


REPLAYED = [(held_back,), (wds.select(len), wds.shuffle(20))]


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("stages", [*REPLAYED, (wds.shuffle(20),), ()])
def test_what_was_skipped_is_skipped_again(make, make_cache, origin, stages, passes):
    """A filter that holds samples back, or a compressed shard, makes a resume read them again."""
    bad = tar_of([("bad-1.json", b"{"), ("bad-2.json", b"{}"), ("bad-3.json", b"}")])
    origin.objects |= {URLS[0]: gzip.compress(origin.objects[URLS[0]]), URLS[1]: bad}
    missing = {URLS[2]: origin.objects.pop(URLS[2])}
    decoder = wds.autodecode.Decoder([wds.autodecode.basichandlers])
    decode = wds.map(decoder, handler=wds.ignore_and_continue)
    one, two = (make(*stages, decode, **SKIP).repeat(passes) for _ in range(2))
    whole = list(one)
    assert len(whole) == passes * (108 - 12 - 11 + 1)
    one.set_epoch(0)
    gc.disable()
    try:
        first = list(islice(one, len(whole) * 2 // 3))
        two.load_state_dict(saved(one))
        assert not make_cache().clean(everything=True, dry_run=True).kept
    finally:
        gc.enable()
    origin.objects |= missing  # the shard is there again
    assert seen(first + list(two)) == seen(whole)
    assert len(list(two)) == len(whole) + passes * 12


@pytest.mark.parametrize("handler", [wds.ignore_and_stop, wds.ignore_and_continue])
@pytest.mark.parametrize(
    ("kept", "begun"),
    [(0, 0), (600, 0), (5000, 2), ("page", 0)],
    ids=["missing", "cut at once", "cut later", "page"],
)
def test_a_handler_decides_whether_a_broken_shard_ends_an_epoch(make, origin, handler, kept, begun):
    shard = b"<html></html>" if kept == "page" else origin.objects[URLS[2]][:kept]
    origin.objects[URLS[2]] = shard or None
    stock = make(resume=False, handler=handler, shardshuffle=False)
    following = KEYS[33:] if handler is wds.ignore_and_continue or kept == 600 else []
    assert keys(stock) == KEYS[: 21 + begun] + following
    for at in range(0, 31, 5):
        one, two = (make(wds.shuffle(4), handler=handler, shardshuffle=False) for _ in range(2))
        first, rest = handed_over(one, two, at)
        assert sorted(keys(first + rest)) == KEYS[: 21 + begun] + following


def test_a_shard_that_is_gone_after_a_resume_costs_one_request(make, make_cache, origin):
    one, two = (make(wds.shuffle(1000), **SKIP) for _ in range(2))
    first = keys(islice(one, 20))
    make_cache().clean(everything=True)
    del origin.objects[URLS[5]]
    origin.requests.clear()
    two.load_state_dict(saved(one))
    left = keys(two)
    assert sorted(first + left) == [key for key in KEYS if key in first or key[:4] != "0005"]
    assert [url for url, *_ in origin.requests].count(URLS[5]) <= 2  # with the one ahead


def test_a_shard_that_is_replaced_after_a_resume_costs_one_sample(make, make_cache, origin):
    errors, urls = [], URLS[:2]
    origin.objects |= {url: sample_tar(n, 400) for n, url in enumerate(urls)}
    options = {"handler": lambda exn: not errors.append(str(exn)), "urls": urls}
    one = make(wds.shuffle(1000), **options)
    assert len(list(islice(one, 20))) == 20
    make_cache().clean(everything=True)
    two = make(wds.shuffle(1000), cache=make_cache(max_size=20_000), **options)
    two.load_state_dict(saved(one))
    rest = iter(two)
    read = list(islice(rest, 3))
    origin.objects |= {url: sample_tar(8 + n, 400) for n, url in enumerate(urls)}
    read += list(rest)
    assert ["was replaced" in error for error in errors] == [True] * (780 - len(read))
    assert len(errors) <= 2


@pytest.mark.parametrize("error", [ShardNotFoundError, ValueError, KeyboardInterrupt])
def test_after_an_exception_the_state_is_that_of_the_last_output(make, make_cache, origin, error):
    def look(sample):
        if sample["__key__"] in bad:
            raise error
        return sample["__key__"]

    stages = wds.shuffle(20), wds.map(look), wds.batched(8, collation_fn=None)
    one, two, three = (make(*stages, shardshuffle=False) for _ in range(3))
    bad, missing, first = set(), {}, []
    whole = list(one)
    if error is ShardNotFoundError:
        make_cache().clean(everything=True)
        missing = {URLS[4]: origin.objects.pop(URLS[4])}
    else:
        bad.add(whole[4][1])
    with pytest.raises(error):
        first.extend(two)
    bad.clear()
    origin.objects |= missing
    three.load_state_dict(saved(two))
    assert first and first + list(three) == whole


@pytest.mark.skipif(BEFORE_1_0, reason="WebDataset does not check for samples")
def test_an_epoch_without_samples_is_an_error_of_webdataset(make, origin):
    resumed(make, empty_check=True)
    origin.objects["s3://lab/empty.tar"] = tar_of({})
    for resume in True, False:
        with pytest.raises(ValueError, match="No samples found"):
            list(make(urls=["s3://lab/empty.tar"], empty_check=True, resume=resume))


@pytest.mark.parametrize("packed", [bytes, gzip.compress])
@pytest.mark.parametrize("stages", [*permutations((wds.shuffle(9), wds.map(key_of)))])
def test_another_number_of_samples_is_refused(make, make_cache, origin, stages, packed):
    origin.objects |= {url: packed(origin.objects[url]) for url in URLS}
    state = resumed(make, *stages)
    make_cache().clean(everything=True)
    origin.objects |= {url: packed(sample_tar(n, 5)) for n, url in enumerate(URLS)}
    other = make(*stages)
    other.load_state_dict(state)
    with pytest.raises(ConfigError, match=r"s3://lab/\d.tar has 5 samples, but had 1\d when this"):
        list(other)


@pytest.mark.parametrize("stages", [(), *REPLAYED])
@pytest.mark.parametrize("select", [None, str.isprintable])
def test_another_order_of_shards_is_refused(make_cache, stages, select):
    def in_turn(shards):
        return iter(sorted(shards, key=lambda shard: shard["url"], reverse=next(orders)))

    reader = wds.tarfile_to_samples(select_files=select)
    parts = wds.SimpleShardList(URLS), in_turn, reader, *stages
    one, two = (make_cache().attach(wds.DataPipeline(*parts), resume=True) for _ in range(2))
    orders = cycle((False, True))
    assert list(islice(one, 40))
    two.load_state_dict(saved(one))
    with pytest.raises(ConfigError, match="the shards come in another order"):
        list(two)


@pytest.mark.parametrize(
    ("stage", "name"),
    [
        (wds.shuffle(9, rng=random.Random(1)), r"shuffle\(9, rng=Random\)"),
        (wds.rsample(0.5), r"rsample\(0.5\)"),
        (wds.filters.Cached(), "Cached"),
        (wds.resampled(), r"resampled\(\)"),
        (wds.SimpleShardList(URLS, seed=time.time()), "SimpleShardList"),
        (wds.RandomMix([[], []]), "RandomMix"),
        (wds.DataPipeline(wds.SimpleShardList(URLS), wds.shuffle(9)), "DataPipeline"),
        (partial(islice, random.Random(1)), "partial"),
        (partial(HeldBack()), "partial"),
    ],
)
def test_a_stage_without_a_seed_is_refused(make, make_cache, stage, name):
    parts = wds.SimpleShardList(URLS), wds.tarfile_to_samples(), stage
    pipeline = wds.DataPipeline(*parts)
    # Also if it is added to a pipeline that is attached.
    for call in (lambda: make_cache().attach(pipeline, resume=True), lambda: make(stage)):
        with pytest.raises(ConfigError, match=f"{name} cannot resume: it draws without a seed"):
            call()


def test_a_state_of_something_else_is_refused_by_name(make, set_variables):
    one, two = make(wds.shuffle(9)), make(wds.shuffle(9))
    state = list(islice(one, 5)) and saved(one)
    for other, text in (
        (make(wds.shuffle(8)), r"other stages: shuffle\(9\), and now shuffle\(8\)"),
        (make(), r"other stages: shuffle\(9\), and now repeat"),
        (make(wds.shuffle(9), urls=URLS[:7]), "other (stages|shards): .*8"),
        (make(wds.shuffle(9)).repeat(2), r"other stages: repeat\(1, -1\), and now repeat\(2"),
    ):
        with pytest.raises(ConfigError, match=text):
            other.load_state_dict(state)
    two.load_state_dict(state)
    with pytest.raises(ConfigError, match=r"other stages: repeat\(1, -1\), and now shuffle\(5\)"):
        list(two.shuffle(5))  # the stages that follow are compared, too
    set_variables(RANK=1, WORLD_SIZE=2)
    with pytest.raises(ConfigError, match="other rank: 0, and now 1"):
        make(wds.shuffle(9)).load_state_dict(state)


def test_stages_may_be_added_after_attach_and_a_length(make):
    def longer(**options):
        return make(**options).with_length(9).shuffle(9).to_tuple("__key__").batched(3)

    resumed(longer)
    for copied in copy.copy, copy.deepcopy, lambda dataset: pickle.loads(pickle.dumps(dataset)):
        assert len(copied(longer())) == 9
    assert isinstance(longer(), wds.WebDataset)


# -- one epoch for all processes ------------------------------------------------------


def batches_of(dataset, workers=2, **options):
    return DataLoader(dataset, batch_size=2, num_workers=workers, collate_fn=keys, **options)


def flat(batches):
    return [key for batch in batches for key in batch]


@pytest.mark.parametrize("before", [0, 1])
def test_all_workers_read_the_same_epoch(of_files, before):
    dataset = of_files(wds.shuffle(5))
    next(iter(batches_of(dataset, before)))
    for _ in range(2):
        torch.manual_seed(0)  # so that all iterations have one seed
        epoch = dataset.epoch
        assert sorted(flat(batches_of(dataset))) == KEYS[:46]
        assert dataset.epoch == epoch + 1


def load(state, _):
    torch.utils.data.get_worker_info().dataset.load_state_dict(state)


def test_later_workers_go_on_with_the_seed_of_a_state(of_files, open_cache):
    one, two = of_files(wds.shuffle(5)), of_files(wds.shuffle(5))
    state = saved(one)
    two.seed = 8
    open_cache().attach(two, resume=True)
    loaders = batches_of(two, 1, worker_init_fn=partial(load, state)), batches_of(two, 1)
    assert [*map(flat, loaders)] == [flat(batches_of(one, 1)), flat(batches_of(one, 1))]


def twice(dataset, through):
    """Read a data set twice, by way of something."""
    for _ in range(2):
        yield from through(dataset)


def in_thread(dataset):
    with ThreadPoolExecutor() as pool:
        return pool.submit(list, dataset).result()


@pytest.mark.parametrize("through", [iter, copy.deepcopy, copy.copy, in_thread, pickle.loads, None])
def test_workers_may_read_a_pipeline_again_or_another_one(of_files, through):
    dataset = of_files(wds.shuffle(5))
    if through is pickle.loads:  # a copy may outlive the pipeline
        dataset = pickle.dumps(dataset)
        gc.collect()
    again = wds.DataPipeline(partial(twice, dataset, through))
    both = again if through else ChainDataset([dataset, of_files()])
    loader = batches_of(both, timeout=60)
    assert sorted(flat(loader)) == sorted(flat(loader)) == sorted(2 * KEYS[:46])


def test_a_fork_of_a_process_that_has_used_threads_of_torch_attaches(of_files):
    torch.zeros(1 << 24).add_(1)
    assert together(1, lambda number: len(list(of_files(wds.shuffle(5))))) == [46]


@pytest.mark.timeout(60)
def test_a_signal_handler_may_save_a_state_at_any_moment(make):
    dataset, saved = make(wds.shuffle(5)), []
    old = signal.signal(signal.SIGPROF, lambda *_: saved.append(dataset.state_dict()))
    try:
        signal.setitimer(signal.ITIMER_PROF, 1e-3, 1e-3)
        while len(saved) < 100:
            dataset.set_epoch(epoch := dataset.epoch + 1)
            assert dataset.epoch == epoch
        state = list(islice(dataset, 5)) and dataset.state_dict()
        saved.clear()
        while len(saved) < 200:
            dataset.load_state_dict(state)
            iter(dataset)  # continues it
        assert {(each["epoch"], each["given"]) for each in saved[1:]} == {(state["epoch"], 5)}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, old)


def test_a_forked_process_goes_on_with_the_epochs_of_its_parent_at_any_moment(make):
    dataset, is_over = make(wds.shuffle(5)), threading.Event()

    def save():
        while not is_over.is_set():
            dataset.state_dict()

    def child(_):
        dataset.set_epoch(7)
        return [*together(1, lambda _: dataset.epoch), dataset.epoch]

    with ThreadPoolExecutor() as pool:
        pool.submit(save)
        try:
            assert [together(1, child) for _ in range(20)] == [[[7, 7]]] * 20
        finally:
            is_over.set()
    assert dataset.epoch == 0


def test_a_seed_that_a_shuffle_states_is_obeyed(make, make_cache):
    dataset = make(wds.shuffle(20, seed=7), shardshuffle=False)
    assert keys(dataset) == keys(dataset) != KEYS
    parts = wds.SimpleShardList(URLS), wds.shuffle(9, seed=7), wds.tarfile_to_samples()
    dataset = wds.DataPipeline(*parts)
    dataset.seed = 7
    assert keys(make_cache().attach(dataset, resume=True)) == keys(dataset) != KEYS


def test_options_of_the_readers_are_obeyed(make_cache, origin):
    origin.objects |= {URLS[0]: tar_of([("a.TXT", b"1"), ("z.txt", b"")])}
    origin.objects |= {URLS[1]: tar_of([("z.cls", b"2"), ("z.cls", b"3"), ("y.txt", b"")])}
    skip, stop = {"handler": wds.ignore_and_continue}, {"handler": wds.ignore_and_stop}
    opener, expander, group = (
        wds.filters.pipelinefilter(getattr(tariterators, name))
        for name in ("url_opener", "tar_file_expander", "group_by_keys")
    )
    for readers in (
        (opener(), expander(), group(lcase=False, **skip)),
        (opener(), expander(), group(**skip)),
        (opener(**skip), expander(**skip), group()),
        (opener(), expander(select_files=lambda name: name != "z.cls"), group()),
        *([] if BEFORE_1_0 else [(opener(), expander(eof_value=None), group(**skip))]),
        *([] if BEFORE_1_0 else [(opener(**stop), expander(**stop), group(**stop))]),
    ):

        def outcome(resume, readers=readers):
            parts = wds.SimpleShardList(URLS[:3]), *readers
            dataset = make_cache().attach(wds.DataPipeline(*parts), resume=resume)
            try:
                return seen(dataset)
            except ValueError as exn:
                return type(exn)

        assert outcome(True) == outcome(False)


@pytest.mark.parametrize("workers", [0, 2])
def test_only_a_tracked_iteration_has_positions(of_files, workers):
    dataset = of_files(wds.shuffle(5))
    loader = batches_of(dataset, workers, persistent_workers=workers > 0)
    tracked = iter(dataset.track(loader))
    first = [key for _ in range(5) for key in next(tracked)]
    state = saved(dataset)
    rest = flat(tracked)
    assert sorted(first + rest) == KEYS[:46]
    assert sorted(flat(loader)) == sorted(keys(dataset)) == KEYS[:46]
    dataset.load_state_dict(state)
    assert saved(dataset) == state
    fresh = of_files(wds.shuffle(5))
    fresh.load_state_dict(saved(of_files(wds.shuffle(5))))  # before an iteration by any worker
    assert sorted(flat(fresh.track(batches_of(fresh, workers)))) == KEYS[:46]
    if workers:
        with pytest.raises(ConfigError, match="new DataLoader"):
            flat(dataset.track(loader))
        dataset.load_state_dict(state)
    assert sorted(flat(dataset.track(batches_of(dataset, workers)))) == sorted(rest)


@pytest.mark.parametrize(("workers", "method"), [(0, None), (2, "forkserver")])
def test_after_all_batches_a_state_begins_the_next_epoch(of_files, workers, method, caplog):
    one, two, three = (of_files(wds.shuffle(5)) for _ in range(3))
    for _ in one.track(batches_of(one, workers)):
        last = saved(one)
    two.load_state_dict(saved(one))
    following = flat(two.track(batches_of(two, workers, multiprocessing_context=method)))
    assert sorted(following) == KEYS[:46] and two.epoch == 2
    assert "no batch is left" not in caplog.text
    three.load_state_dict(last)
    assert flat(three.track(batches_of(three, workers))) == []
    assert "the end of epoch 0, of which no batch is left" in caplog.text
    assert flat(three.track(batches_of(three, workers))) == following


def test_a_state_that_only_workers_know_is_said(of_files, caplog):
    dataset = of_files()
    flat(batches_of(dataset))
    saved(dataset)
    assert "track" not in caplog.text
    next(iter(dataset))  # a peek, whose position is not that of the workers
    batches = iter(batches_of(dataset))
    next(batches)
    assert (saved(dataset)["epoch"], saved(dataset)["given"]) == (dataset.epoch, 0)
    assert "the workers of a DataLoader know the position" in caplog.text
    flat(batches)
    assert (saved(dataset)["epoch"], saved(dataset)["given"]) == (dataset.epoch, 0)


def test_a_tracked_iteration_ends_when_a_state_is_loaded_or_an_epoch_set(of_files, caplog):
    dataset = of_files()
    state = saved(dataset)
    dataset.load_state_dict(state)
    dataset.set_epoch(1)
    assert "set_epoch(1) leaves the position that was loaded" in caplog.text
    dataset.set_epoch(0)
    for _ in islice(dataset.track(batches_of(dataset)), 3):
        assert dataset.state_dict()["epoch"] == 0
    dataset.set_epoch(1)  # the next one
    assert dataset.state_dict() == saved(of_files()) | {"epoch": 1}
    for change, to in (dataset.load_state_dict, state), (dataset.set_epoch, 7):
        batches = dataset.track(batches_of(dataset))
        next(batches)
        change(to)
        with pytest.raises(ConfigError, match="begin another one"):
            next(batches)


@pytest.mark.parametrize("peek", ["pipeline", "loader", "copy"])
def test_a_peek_leaves_the_tracked_position(of_files, peek):
    dataset, other = (of_files(wds.shuffle(5)) for _ in range(2))
    first, states = [], []
    for batch in dataset.track(batches_of(dataset)):
        first += batch
        if len(first) == 10:
            own = copy.copy(dataset) if peek == "copy" else dataset
            assert peek != "copy" or own.state_dict()["given"] == 0
            next(iter(batches_of(dataset, 1) if peek == "loader" else own))
            states.append(saved(dataset))
        if len(first) == 20:
            break
    states.append(saved(dataset))  # after the loop
    rest = [key for key in KEYS[:46] if key not in first]
    other.load_state_dict(states[1])
    assert sorted(flat(other.track(batches_of(other)))) == rest
    other.load_state_dict(states[0])
    assert sorted(flat(other.track(batches_of(other)))) == sorted(rest + first[10:])
    next(iter(dataset))  # another iteration takes over
    assert "given" in saved(dataset)


BROKEN = {
    "epoch": (-1, "x", None, 1.5, True), "given": ("x", None), "passes": (-1, "x"), "seed": ("x",),
    "entered": (-1, None, 10**9), "counts": (5, " x"), "check": (None,), "ended": (5, "all"),
    "worker": (7, None), "workers": ("x", None), "version": (9,), "before": (-1, 10**9),
}  # fmt: skip


def test_a_state_that_no_pipeline_has_saved_is_refused_by_field(make):
    dataset = make()
    next(iter(dataset))
    state = saved(dataset)
    assert BROKEN.keys() | {"shards", "stages", "rank", "world_size"} == state.keys()
    broken = [(name, {**state, name: value}) for name in BROKEN for value in BROKEN[name]]
    broken += [(name, {each: state[each] for each in state if each != name}) for name in state]
    broken += [(name, {"epoch": 0, "workers": [each]}) for name, each in broken]
    broken += [("version", {"epoch": 0, "workers": 5}), ("version", {"epoch": 0, "workers": [{}]})]
    broken += [("epoch", {"epoch": 1, "workers": [state]}), ("epoch", {"workers": []})]
    others = None, {}, {"epoch": 0, "workers": [5]}, {"data": state}
    broken += [("not the state", each) for each in others]
    for name, each in broken:
        with pytest.raises(ConfigError, match=name):
            dataset.load_state_dict(each)
    for epoch in 1.0, "1", -1:
        with pytest.raises(ConfigError, match="epoch"):
            dataset.set_epoch(epoch)
    dataset.set_epoch(torch.tensor(3))
    assert dataset.epoch == 3


def test_track_refuses_loaders_that_it_cannot_track(of_files):
    dataset = of_files()
    for each in wds.WebLoader(dataset), batches_of(of_files().shuffle(5), 0):
        with pytest.raises(ConfigError, match="DataLoader"):
            next(iter(dataset.track(each)))


def test_track_refuses_another_number_of_workers_before_they_start(of_files):
    one, two = of_files(), of_files()
    for _ in islice(one.track(batches_of(one, 2)), 3):
        state = saved(one)
    two.load_state_dict(state)
    for workers in (0, 1, 3):
        text = f"^the state was saved with other workers: 2, and now {workers or 1}. Resume with"
        with pytest.raises(ConfigError, match=text):
            next(two.track(batches_of(two, workers)))
    assert saved(two) == state and next(two.track(batches_of(two, 2)))
    two.load_state_dict(state)
    with pytest.raises(ConfigError, match="other workers: 2, and now 1"):
        next(iter(two))


def test_a_program_that_ends_amid_a_tracked_iteration_ends_silently(tmp_path):
    (tmp_path / "0.tar").write_bytes(sample_tar(0, 5))
    program = f"""if True:
        import shardcache, torch, webdataset
        dataset = webdataset.WebDataset(["{tmp_path}/0.tar"], shardshuffle=False)
        dataset = shardcache.Cache("{tmp_path}/cache").attach(dataset, resume=True).map(len)
        batches = dataset.track(torch.utils.data.DataLoader(dataset))
        next(batches)
    """
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_state_of_a_pipeline_that_was_extended_is_not_that_of_the_copy(make, caplog):
    one = make()
    two = one.shuffle(9).to_tuple("__key__").batched(3)
    assert list(islice(two, 5)) and one.epoch == 0 and not caplog.text
    one.load_state_dict(saved(one))
    assert caplog.text.count("Save and load that of the copy") == 1


def test_another_cache_takes_the_place_of_the_first_one(make, make_cache, tmp_path):
    dataset, other = make(wds.shuffle(9)), make_cache(dir=tmp_path / "other")
    assert sorted(keys(other.attach(dataset))) == KEYS
    assert other.stats().misses == len(URLS)


def test_methods_of_a_subclass_come_before_those_that_resume(make_cache):
    class Named(wds.WebDataset):
        def __iter__(self):
            return ((sample["__key__"], 1) for sample in super().__iter__())

        def state_dict(self):
            return {**super().state_dict(), "mine": 2}

    dataset = make_cache().attach(Named(URLS[:1], shardshuffle=False), resume=True)
    assert next(iter(dataset))[1] == 1 and dataset.state_dict()["mine"] == 2


def test_a_loader_that_ends_late_does_not_end_a_later_iteration(of_files):
    dataset = of_files(wds.shuffle(5))
    loader = iter(DataLoader(dataset, batch_size=None, num_workers=1))
    next(loader)
    mine = iter(dataset)
    next(mine)
    before = dataset.state_dict()
    assert before["given"] == 1
    assert len([*loader]) > 40
    assert dataset.state_dict() == before

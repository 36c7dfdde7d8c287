"""A mixture takes samples of several data sets in proportion, resumes exactly, and reads them."""

import json
import random
from collections import Counter
from functools import partial
from itertools import accumulate

import numpy as np
import pytest
import webdataset as wds
from torch.utils.data import DataLoader

from shardcache import ConfigError, Mixture, ShardBatchSampler, TarDataset
from tests.dataset.test_sampler import read
from tests.support.tars import sample_tar


@pytest.fixture
def make(make_cache, indexed):
    """Make data sets of one cache, none of whose shards exists."""
    return partial(indexed, make_cache(prefetch=1))


@pytest.fixture
def trio(make):
    counts = {"web": [50] * 20, "code": [7, 0, 30], "math": [90]}
    return {name: make(name, each) for name, each in counts.items()}


def mixed(parts, weights, samples):
    return Mixture({name: (parts[name], weights[name]) for name in weights}, samples=samples)


def sampler(data, size=24, world=1, rank=0, **options):
    return ShardBatchSampler(
        data, size, **{"lanes": 2, "shuffle": 3, "world_size": world, "rank": rank, **options}
    )


def names(data, numbers):
    """Return the part of each sample."""
    ends = list(accumulate(map(len, data.parts.values())))
    return [list(data.parts)[part] for part in np.searchsorted(ends, numbers, "right")]


WEIGHTS = {"web": 0.5, "code": 0.3, "math": 0.2}


def test_every_batch_has_the_proportions_and_so_have_100_epochs(trio):
    data = mixed(trio, WEIGHTS, 240)
    whole = sampler(data)
    epochs = [read([whole]) for _ in range(100)]
    assert len({str(epoch) for epoch in epochs}) == 100  # each has an order of its own
    taken = Counter[str]()
    for epoch in epochs:
        assert len(epoch) == len(whole) == 10
        for batch in epoch:
            counts = Counter(names(data, batch))
            for name, weight in WEIGHTS.items():
                assert abs(counts[name] - 24 * weight) <= 2 * len(WEIGHTS)
            taken += counts
    expected = {name: taken.total() * weight for name, weight in WEIGHTS.items()}
    # Chi-square with two degrees of freedom: random draws exceed 0.02 in 99 of 100 runs.
    assert sum((taken[name] - n) ** 2 / n for name, n in expected.items()) < 0.02


def test_no_sample_of_a_part_comes_again_before_all_others(trio):
    """A part of 37 samples is read 10 times, in another order each time; a large one not once."""
    data = mixed(trio, {**WEIGHTS, "web": {0: 0.5, 2: 1, 4: 0.5}}, 240)
    whole = sampler(data, lanes=1)
    numbers = [number for _ in range(6) for batch in read([whole]) for number in batch]
    by_part = {name: [] for name in WEIGHTS}
    for name, number in zip(names(data, numbers), numbers, strict=True):
        by_part[name].append(number)
    for name, own in by_part.items():
        size = len(trio[name])
        rounds = [tuple(own[n : n + size]) for n in range(0, len(own), size)]
        assert all(len(set(each)) == len(each) for each in rounds)
        assert len(set(rounds)) == len(rounds) == -(-len(own) // size)
    assert len(by_part["web"]) < 1000 and len(by_part["code"]) > 10 * 37


def test_ranks_continue_at_a_random_position_as_one_that_reads_from_the_start(make):
    draw = random.Random(4)
    for number in range(30):
        counts = [
            [draw.choice([0, 1, 5, 40]) for _ in range(5)] + [4] for _ in range(draw.randint(1, 5))
        ]
        parts = {f"{number}-{n}": make(f"{number}-{n}", each) for n, each in enumerate(counts)}
        weights = {name: {0: draw.random(), 2: draw.choice([0, 1e-9, 3])} for name in parts}
        weights[f"{number}-0"] = 1
        data, lanes = mixed(parts, weights, draw.randint(30, 200)), draw.randint(1, 4)
        options = {"size": 4 * lanes, "lanes": lanes, "drop_last": number % 2}
        whole, world = sampler(data, **options), draw.choice([1, 2, 4])
        for _ in range(draw.randint(1, 4)):
            batches = read([whole])
        state = json.dumps(whole.state_dict(batch=(at := draw.randrange(len(whole)))))
        ranks = [sampler(data, world=world, rank=rank, **options) for rank in range(world)]
        for each in ranks:
            each.load_state_dict(json.loads(state))
        assert read(ranks) == batches[at:]
        assert read(ranks, 2) == read([whole], 2)  # of the next epoch


def test_weights_change_only_with_an_epoch_that_has_not_begun(trio):
    first = sampler(mixed(trio, WEIGHTS, 240))
    read([first])
    border = first.state_dict()
    read([first], 3)
    state = first.state_dict()
    assert len(json.dumps(state)) < 300
    later = {**WEIGHTS, "web": {0: 0.5, 1: 5.0}}
    changed = sampler(mixed(trio, later, 240))
    changed.load_state_dict(border)
    assert Counter(names(changed.data, read([changed], 1)[0]))["web"] >= 20
    with pytest.raises(ConfigError, match="other weights: .* web 78, code 46, .* web 92"):
        changed.load_state_dict(state)
    for other in mixed(trio, WEIGHTS, 241), trio["web"]:
        with pytest.raises(ConfigError, match="other shards or counts of samples"):
            sampler(other).load_state_dict(state)


def test_the_order_is_the_same_for_ever(trio):
    whole = sampler(mixed(trio, WEIGHTS, 240), 12, seed=7)
    first = read([whole], 1)
    whole.set_epoch(100)
    assert [*first, *read([whole], 1)] == [
        [1078, 314, 1014, 308, 1043, 328, 1105, 830, 1019, 280, 1095, 260],
        [1068, 301, 1009, 480, 1045, 481, 1125, 226, 1035, 543, 1082, 534],
    ]


@pytest.mark.parametrize(
    ("weights", "samples", "text"),
    [
        ({}, 9, "data sets that share one cache"),
        (WEIGHTS, 0, "samples=0 is not a whole number from 1"),
        (WEIGHTS, 1e2, "samples=100.0 is not a whole number"),
        ({"web": -1, "code": 2}, 9, "'web' .* no weight of 0 or more in epoch 0"),
        ({"web": {1: 0.5}, "code": 2}, 9, "'web' .* no weight of 0 or more in epoch 0"),
        ({"web": 1, "code": float("nan")}, 9, "'code'"),
        ({"web": {0: 1, 3: 0}, "code": 0}, 9, "weights .* add up to 0 in epoch 3"),
        ({"web": 1e308, "code": 1e308}, 9, "weights .* add up to inf in epoch 0"),
        (WEIGHTS, 240, "'code' of the mixture has 37 samples, fewer than the 48 lanes"),
    ],
)
def test_mixtures_that_cannot_be_are_refused(trio, weights, samples, text):
    with pytest.raises(ConfigError, match=text):
        sampler(mixed(trio, weights, samples), 48, lanes=48)


def test_a_part_needs_a_weight_and_the_cache_of_the_others(trio, make_cache, tmp_path):
    other = TarDataset(tmp_path / "web.json", cache=make_cache(dir=tmp_path / "other"))
    for parts in {"web": other}, [other], {"web": (other, 1), "code": (trio["code"], 1)}:
        with pytest.raises(ConfigError, match=r"share one cache.* \(web, 0.7\)"):
            Mixture(parts, samples=9)


def test_batches_state_the_shards_of_all_parts_in_use(make):
    parts = {"b": make("b", [4] * 50), "a": make("a", [4] * 3), "off": make("off", [4] * 5)}
    weights = {"b": 1, "a": 99, "off": {0: 0, 9: 1}}
    whole = sampler(mixed(parts, weights, 200), 2, lanes=1, shuffle=1)
    ends = list(accumulate(whole.data.counts))
    for batch in whole:
        # The shard of `b` is listed before its first sample is read, so its download has started.
        assert len(batch.shards) == 2 and min(batch.shards) in range(50)
        used = {next(shard for shard, end in enumerate(ends) if n < end) for n in batch}
        # A batch may begin in one shard of `a` and end in another.
        assert used - batch.shards <= {50, 51, 52}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_reads_the_samples_of_all_parts(make_cache, origin, workers, monkeypatch, caplog):
    monkeypatch.setattr("shardcache.dataset.dataset._IDLE", 600)
    for part in ("web", "books"):
        origin.objects |= {f"s3://{part}/{n}.tar": sample_tar(n, 6) for n in range(3)}
    cache = make_cache()
    stages = [wds.decode(), wds.to_tuple("__key__", "__url__", "__epoch__")]
    web, books = (
        TarDataset(f"s3://{part}/{{0..2}}.tar", cache=cache, stages=stages)
        for part in ("web", "books")
    )
    data = Mixture({"web": (web, 3), "books": (books, 1)}, samples=32)
    assert [data[n] for n in (0, -1)] == [web[0], books[-1]]
    assert (repr(data), len(data)) == ("<Mixture: web, books, 32 samples per epoch>", 36)
    with pytest.raises(IndexError):
        data[36]
    order = ShardBatchSampler(data, 8, shuffle=3)
    loader = DataLoader(data, batch_sampler=order, num_workers=workers, collate_fn=list)
    batches = [*loader, *loader]
    assert len(batches) == 8 and {epoch for *_, epoch in batches[-1]} == {1}
    for batch in batches:
        assert Counter(url[5:8] for _, url, _ in batch) == {"web": 6, "boo": 2}
    if not workers:
        assert cache.stats().opens == 2 * 6  # counted, and then open: all are in the window
    assert sum("the weights of a mixture" in text for text in caplog.messages) == 1  # of data[0]
    with pytest.raises(ConfigError, match="pass it as batch_sampler=, not as sampler="):
        next(iter(DataLoader(data, sampler=order)))


def test_parts_of_a_data_set_keep_their_own_shards_open(make_cache, origin, monkeypatch):
    monkeypatch.setattr("shardcache.dataset.dataset._IDLE", 600)
    origin.objects |= {f"s3://web/{n}.tar": sample_tar(n, 20) for n in range(8)}
    cache = make_cache()
    web = TarDataset("s3://web/{0..7}.tar", cache=cache)
    halves = web.split([0.5, 0.5])
    for number, parts in enumerate(([web, web], halves), 1):
        data = Mixture({str(n): (half, 1) for n, half in enumerate(parts)}, samples=2 * 60)
        for batch in ShardBatchSampler(data, 4, shuffle=2):
            data.__getitems__(batch)
        # Counted, and read; an epoch of a half may begin again.
        assert cache.stats().opens <= 8 + number * (8 + 2)
    del web, parts
    del data, halves[1]  # a part that is gone keeps none
    batch = next(iter(ShardBatchSampler(halves[0], 4, shuffle=2)))
    halves[0].__getitems__(batch)
    assert cache.clean(everything=True, dry_run=True).kept <= len(batch.shards)


def test_a_part_that_drops_samples_keeps_the_others_in_place(make_cache, origin):
    origin.objects |= {f"s3://{part}/0.tar": sample_tar(part == "b", 8) for part in "ab"}
    cache = make_cache()
    odd = wds.select(lambda sample: int(sample["__key__"][-1]) % 2)
    a, b = (TarDataset(f"s3://{p}/0.tar", cache=cache, stages=[odd] * (p == "a")) for p in "ab")
    data = Mixture({"a": (a, 1), "b": (b, 1)}, samples=8)
    keys = [sample["__key__"][-1] for sample in data.__getitems__([0, 8, 1, 9, 2, 10, 3])]
    assert keys == ["1", "0", "3", "1", "2"]
    assert data[8:10] == data[np.array([8, 9])] == [data[8], data[-7]]
    assert len(data.__getitems__([0, 8])) == 1  # the stages leave none of the first part
    with pytest.raises(ConfigError, match="left none of 1 samples"):
        data.__getitems__([0])


# -- selections and splits of one data set ------------------------------------------


def test_a_selection_has_its_samples_in_order_and_mixes_with_others(make_cache, origin):
    origin.objects |= {f"s3://lab/{n}.tar": sample_tar(n, 6) for n in range(3)}
    data = TarDataset("s3://lab/{0..2}.tar", cache=make_cache())
    some = data.select(np.array([16, 3, 0, 7]))
    assert list(some) == [data[n] for n in (0, 3, 7, 16)] and some[-1]["__index__"] == 16
    assert (some.counts.tolist(), some.locate(2)) == ([2, 1, 1], ("s3://lab/1.tar", 1))
    assert list(some.select(range(1, 3))) == [data[3], data[7]]
    with pytest.raises(IndexError, match="has 4 samples"):
        some[4]
    for wrong in [1, 1], [0.5], [], np.array([], int):
        with pytest.raises(ConfigError, match="each of them once"):
            data.select(wrong)
    for wrong in [18], [-1]:
        with pytest.raises(IndexError, match="has 18 samples"):
            data.select(wrong)
    state = ShardBatchSampler(some, 2, shuffle=0).state_dict()
    with pytest.raises(ConfigError, match="other shards or counts of samples"):
        ShardBatchSampler(data.select([0, 4, 7, 16]), 2, shuffle=0).load_state_dict(state)


def test_a_split_keeps_its_samples_when_shards_are_added(make):
    def places(data):
        return [data.locate(n) for n in range(len(data))]

    small, large, fractions = make("lab", [1000] * 8), make("lab", [1000] * 11), [0.7, 0.2, 0.1]
    parts, every = [*map(places, small.split(fractions))], {*places(small)}
    assert sorted(place for part in parts for place in part) == sorted(every)
    for part, fraction, later in zip(parts, fractions, large.split(fractions), strict=True):
        assert abs(len(part) / 8000 - fraction) < 0.02
        assert [place for place in places(later) if place in every] == part
    other = small.split([0.5], seed=1)[0]
    assert 0.4 < len(other) / 8000 < 0.6
    for seed in (2, 3):  # a part is split as the whole, even with the same seed
        assert len(small.split([0.5], seed=2)[0].split([0.5], seed=seed)[0]) in range(1700, 2300)
    for wrong in ([], [0.0, 1], [0.8, 0.3], [1e-9, 0.5]):
        with pytest.raises(ConfigError):
            small.split(wrong)

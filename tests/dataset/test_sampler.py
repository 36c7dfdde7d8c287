"""A sampler gives all ranks equal parts of the same batches, and resumes where a state says."""

import copy
import itertools
import json
import subprocess
import sys
import threading
import time

import pytest
from torch import distributed
from torch.utils import data as torch_data

from shardcache import ShardBatchSampler
from shardcache.dataset import sampler as module
from shardcache.errors import ConfigError
from tests.support.caches import warnings
from tests.support.storetools import age, together, wait_until
from tests.support.tars import make_tar

COUNTS = [30, 0, 50, *[20] * 40]  # 880 samples


@pytest.fixture
def make(make_cache, indexed):
    """Make samplers of one data set, all without downloads."""
    cache = make_cache(prefetch=0)

    def make(size=48, world=1, rank=0, counts=COUNTS, **options):
        place = {} if world is None else {"rank": rank, "world_size": world}
        data = indexed(cache, "lab", counts)
        return ShardBatchSampler(data, size, **{"shuffle": 4, **options, **place})

    return make


def read(samplers, most=None):
    """Read batches of all ranks at once, and return the global batches."""
    found = []
    iterators = [iter(each) for each in samplers]
    while most is None or len(found) < most:
        parts = [next(each, None) for each in iterators]
        if None in parts:
            assert parts == [None] * len(parts)  # no rank has one batch more
            break
        assert len({len(part) for part in parts}) == 1
        found.append([int(n) for part in parts for n in part])
    return found


@pytest.mark.parametrize("drop_last", [True, False])
def test_the_world_may_change_in_the_middle_of_epochs(make, drop_last):
    options = {"lanes": 4, "drop_last": drop_last, "seed": 5}
    whole = make(**options)
    expected = [read([whole]) for _ in range(3)]
    assert [len(each) for each in expected] == [len(whole)] * 3 == [18 + (not drop_last)] * 3
    found, state = [], None
    # The second world reads to the end of an epoch, and the third continues with the next one.
    for world, most in ((8, 11), (2, None), (2, 13), (4, 2), (1, None), (8, None)):
        samplers = [make(world=world, rank=rank, **options) for rank in range(world)]
        for each in samplers if state else ():
            each.load_state_dict(json.loads(json.dumps(state)))
        found += read(samplers, most)
        (state,) = {json.dumps(each.state_dict()): each.state_dict() for each in samplers}.values()
    assert found == [batch for epoch in expected for batch in epoch]
    assert (state["epoch"], state["taken"]) == (3, 0)


def test_the_batch_size_may_change_when_a_job_resumes(make):
    first = make(48, lanes=2)
    found = [n for batch in read([first], 5) for n in batch]
    for size, most in ((28, 3), (64, None)):
        second = make(size)
        second.load_state_dict(first.state_dict())
        batches = read([second], most)
        assert {len(each) for each in batches} == {size}
        assert not most or second.state_dict(second.batch + most) == second.state_dict()
        found += [n for batch in batches for n in batch]
        first = second
    assert len(set(found)) == len(found) > sum(COUNTS) - 64
    assert (first.epoch, first.batch) == (1, 0)
    assert len(read([first])) == len(first) == 13


def test_batches_out_of_order_have_no_state(make):
    sampler = make()
    options = {"batch_sampler": sampler, "num_workers": 1, "in_order": False}
    next(iter(torch_data.DataLoader(range(880), **options)))
    with pytest.raises(ConfigError, match="with in_order=False, a number of batches does not say"):
        sampler.state_dict(batch=1)


def test_to_leave_a_loaded_position_is_logged(make, caplog):
    sampler = make()
    sampler.load_state_dict(make().state_dict(batch=2))
    sampler.set_epoch(0)  # goes on
    assert warnings(caplog) == [] and sampler.batch == 2
    sampler.set_epoch(1)
    sampler.load_state_dict(make().state_dict(batch=18))  # that of the next epoch
    sampler.set_epoch(0)
    text = "set_epoch({}) leaves the position that was loaded: epoch {}, batch {}"
    assert warnings(caplog) == [text.format(1, 0, 2), text.format(0, 1, 0)]


def test_an_iteration_begins_where_the_last_complete_one_or_a_state_ends(make):
    sampler, other = make(), make()
    first = read([sampler], 3)
    assert sampler.state_dict()["taken"] == 3 * 48
    assert read([sampler], 3) == first  # `iter` itself changes nothing
    assert read([sampler], 18)[:3] == first and sampler.epoch == 1  # complete
    # Workers have read the whole epoch, and the training is behind.
    trained = sampler.state_dict(batch=16)
    assert (trained["epoch"], trained["taken"]) == (0, 16 * 48)
    assert sampler.state_dict(batch=18)["epoch"] == sampler.state_dict()["epoch"] == 1
    with pytest.raises(ConfigError, match="batch=19 is not a whole number from 0 to 18"):
        sampler.state_dict(batch=19)  # such as the number of a step of the whole run
    sampler.set_epoch(0)  # once more
    assert (sampler.state_dict()["epoch"], sampler.state_dict()["taken"]) == (0, 0)
    sampler.set_epoch(7)
    whole = read([sampler])
    other.load_state_dict({**trained, "epoch": 7, "taken": 5 * 48})
    other.set_epoch(7)  # as the loops of frameworks do
    assert (other.epoch, other.batch) == (7, 5) and whole[:3] != first
    assert repr(other) == f"<ShardBatchSampler: {len(other.data)} samples, epoch 7, batch 5>"
    assert read([other]) == whole[5:] and other.epoch == 8


@pytest.mark.parametrize("stop", [3, 16])
def test_after_a_loop_that_ended_early_the_epoch_begins_again(make, stop):
    """Although the workers of the loader have read ahead, after 16 batches to the last of 18."""
    sampler = make()
    loader = torch_data.DataLoader([*range(880)], batch_sampler=sampler, num_workers=1)
    assert len([*itertools.islice(loader, stop)]) == stop
    assert (sampler.epoch, sampler.batch, sampler.state_dict()["taken"]) == (0, 0, stop * 48)
    assert (len([*loader]), sampler.epoch) == (18, 1)


def test_states_of_other_orders_are_refused_by_name(make):
    state = make(lanes=2).state_dict()
    for options, changes, text in (
        ({"seed": 1}, {}, "seed was 0 and is 1"),
        ({"lanes": 4}, {}, "lanes was 2 and is 4"),
        ({"shuffle": 5}, {}, "shuffle was 4 and is 5"),
        ({"counts": [*COUNTS[:-2], 19, 21]}, {}, "other shards or counts of samples"),
        ({"size": 45}, {}, "global_batch=45 cannot be divided among 2 lanes.* a multiple of 2"),
        ({}, {"version": 0}, "version was 0 and is 1"),
        ({"lanes": 2}, {"taken": sum(COUNTS)}, "the state's taken="),  # of each of two lanes
    ):
        with pytest.raises(ConfigError, match=text):
            make(**options).load_state_dict({**state, **changes})
    with pytest.raises(ConfigError, match="is not a state of"):
        make().load_state_dict({"epoch": 3})
    default = make(shuffle=None)
    default.load_state_dict(state)
    assert (default.order.lanes, default.shuffle) == (2, 4)


IMPOSSIBLE = [-1, 1e3, "3", None, True, [2], 10**30]
FIELDS = {"epoch": IMPOSSIBLE, "taken": IMPOSSIBLE, "version": [True, 1.0], "seed": [False, 0.0]}
FIELDS |= {"lanes": [*IMPOSSIBLE[:6], 0], "shuffle": IMPOSSIBLE[:6], "global_batch": [None, 0]}


@pytest.mark.parametrize("field", FIELDS)
def test_a_state_that_cannot_be_is_refused_by_field(make, field):
    sampler = make(shuffle=None)
    state = sampler.state_dict()
    loads = sampler.load_state_dict, iter(sampler).load_state_dict
    for load, value in itertools.product(loads, FIELDS[field]):
        with pytest.raises(ConfigError, match=f"the state's {field}=.* is not a whole number"):
            load({name: each for name, each in {**state, field: value}.items() if each is not None})
        with pytest.raises(ConfigError, match="is not a state of a ShardBatchSampler"):
            load([field])
    for call in (sampler.set_epoch, sampler.state_dict) if field == "epoch" else ():
        for value in IMPOSSIBLE[:3]:
            with pytest.raises(ConfigError, match=r"(epoch|batch)=.* is not a whole number from 0"):
                call(value)
    assert sampler.state_dict() == state


def test_numbers_that_do_not_fit_name_those_that_do(make):
    for options, text in (
        ({"size": 50, "world": 4, "lanes": 2}, "2 lanes and 4 ranks. Use a multiple of 4"),
        ({"size": 2, "lanes": 4}, "4 lanes and 1 ranks. Use a multiple of 4"),
        ({"size": 1000}, "880 samples fill no batch of 1000. Use global_batch=880"),
        ({"counts": [0, 0]}, "0 samples fill no batch"),
        ({"size": 0}, "global_batch=0 is not a whole number from 1"),
        ({"rank": 4, "world": 4}, "rank=4 is not a whole number from 0 to 3"),
        ({"world": 0}, "world_size=0 is not a whole number from 1"),
        ({"lanes": 2.0}, "lanes=2.0 is not"),
        ({"shuffle": -1}, "shuffle=-1 is not a whole number from 0"),
        ({"shuffle": True}, "shuffle is a number of shards to mix"),
        ({"seed": None}, "seed=None is not"),
    ):
        with pytest.raises(ConfigError, match=text):
            make(**options)
    with pytest.raises(ConfigError, match="not Subset"):
        ShardBatchSampler(torch_data.Subset(make().data, [1]), 4)
    with pytest.raises(ConfigError, match=r"Trainer\(use_distributed_sampler=False\)"):
        ShardBatchSampler(range(3), batch_size=4, drop_last=True)  # as Lightning does


def test_defaults_come_from_the_launcher(make, set_variables, monkeypatch, caplog):
    set_variables(RANK=5, WORLD_SIZE=8, LOCAL_RANK=1, LOCAL_WORLD_SIZE=4)
    sampler = make(world=None, shuffle=None)
    assert (sampler.rank, sampler.world_size) == (5, 8)
    assert (sampler.order.lanes, sampler.shuffle) == (2, 32)
    assert make(world=None, shuffle=0).order.lanes == 1
    set_variables(RANK=0)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert make(world=None).order.lanes == 1 and "pass lanes=NODES" in warnings(caplog)[0]
    set_variables(LOCAL_WORLD_SIZE=2)
    make(world=None).load_state_dict(make(lanes=2).state_dict())
    assert warnings(caplog)[1:] == [
        "4 nodes read 2 lanes, so several nodes download the same shards"
    ]
    monkeypatch.delenv("RANK")
    for _ in range(2):
        make(world=None)
    assert [each[:37] for each in warnings(caplog)[2:]] == ["only one of RANK and WORLD_SIZE is se"]


def test_an_iteration_has_the_rank_of_its_process(make, set_variables):
    sampler, parts = make(world=None), []  # as before `mp.spawn`
    assert (sampler.batch_size, sampler.drop_last) == (48, True)
    for rank in range(3):
        set_variables(RANK=rank, WORLD_SIZE=3, LOCAL_WORLD_SIZE=3)
        spawned = copy.copy(sampler)
        parts.append(iter(spawned))
        assert (spawned.rank, spawned.world_size, spawned.batch_size) == (rank, 3, 16)
    assert read(parts) == read([make()])
    set_variables(WORLD_SIZE=5)
    with pytest.raises(ConfigError, match="48 cannot be divided among 1 lanes and 5 ranks"):
        iter(sampler)


def test_a_sampler_is_one_of_torch_but_needs_no_torch(make):
    assert isinstance(make(), torch_data.Sampler)
    code = "import sys, shardcache; shardcache.TarDataset; assert 'torch' not in sys.modules; "
    code += "sys.modules['torch'] = None; shardcache.ShardBatchSampler"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_ranks_that_differ_are_refused(make, monkeypatch):
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        monkeypatch.setattr(module, "_numbers", iter([0, 1, 0, 1, 0, 0]))  # as on three ranks
        for options in ({}, {"lanes": 2}, {}, {"lanes": 2}):
            iter(make(world=None, **options))
        iter(copy.copy(make(world=None, seed=3)))  # a copy that one rank made
        other = make(world=None, seed=3)
        with pytest.raises(ConfigError, match="the ranks differ: seed 3 and 0"):
            iter(other)
    finally:
        distributed.destroy_process_group()


@pytest.fixture
def data_of(make_cache, indexed, origin):
    """Make a data set of twelve shards of four samples in a cache."""

    def make(**options):
        data = indexed(make_cache(**options), "lab", [4] * 12)
        origin.objects.update({str(each): make_tar(n) for n, each in enumerate(data.shards)})
        return data

    return make


def test_the_shards_of_the_windows_are_downloaded_ahead(data_of, origin):
    data = data_of(prefetch=2)
    ranks = [
        ShardBatchSampler(data, 4, shuffle=3, lanes=2, rank=rank, world_size=2) for rank in (0, 1)
    ]
    batches = iter(ranks[1])
    own = {n // 4 for batch in batches for n in batch}
    wait_until(lambda: {n for n, each in enumerate(data.shards) if each in data.cache} == own)
    assert len(own) == 6
    requests = len(origin.requests)
    age(data.cache.dir)
    again = iter(ranks[1])
    assert {n // 4 for batch in again for n in batch} == own
    # The cached shards of a window are used, so that others are evicted before them.
    wait_until(lambda: all(each.used > time.time() - 60 for each in data.cache.entries()))
    batches = iter(ranks[0])
    next(batches)
    wait_until(lambda: sum(each in data.cache for each in data.shards) == 6 + 3 + 2)
    assert len(origin.requests) == requests + 5


def test_an_iteration_that_is_dropped_downloads_no_further_shards(data_of, origin):
    data, event = data_of(prefetch=1), origin.hold(0)
    sampler = ShardBatchSampler(data, 4, shuffle=9)
    next(iter(sampler))
    event.set()
    wait_until(lambda: not [t for t in threading.enumerate() if t.name == "shardcache-prefetch"])
    assert len(origin.requests) == 1


def test_a_child_that_continues_an_iteration_downloads_ahead(data_of, origin):
    data, event = data_of(prefetch=1), origin.hold(0)
    batches = iter(ShardBatchSampler(data, 4, shuffle=1))
    next(batches)
    wait_until(lambda: origin.requests)

    def go_on(number):
        data.cache.process.origins.use("s3", origin)
        next(batches)
        ahead = [data.shards[n] for n in batches._epoch.shards(1)]
        wait_until(lambda: all(shard in data.cache for shard in ahead))
        assert len(ahead) == 2

    with batches._ahead._lock:
        together(1, go_on)
    # The parent's own download is held.
    assert sum(shard in data.cache for shard in data.shards) >= 2
    event.set()


@pytest.mark.parametrize(("shuffle", "shards"), [(3, 6), (None, 12)])
def test_too_little_room_is_logged_once(data_of, caplog, shuffle, shards):
    size = len(make_tar(0))
    data = data_of(prefetch=2, max_size=size * 4)
    for _ in range(2):
        sampler = ShardBatchSampler(data, 4, shuffle=shuffle)
        batches = iter(sampler)
        next(batches)
        wait_until(lambda: batches._ahead.size)  # noqa: B023
        list(batches)
    (text,) = [each for each in warnings(caplog) if "at a time" in each]
    assert f"this node uses {shards} shards at a time" in text

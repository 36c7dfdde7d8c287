"""The order is a permutation, the same for every world size, and mixes the shards of its window."""

import random

from shardcache.dataset import order as module
from shardcache.dataset.order import Epoch, Order, chained, permutation


def batches(order, epoch, size, world, *, drop_last):
    """Return the global batches of an epoch, each as its ranks read it: the parts of all ranks."""
    share, part = size // order.lanes, size // world
    ranks = [Epoch(order, epoch) for _ in range(world)]
    return [
        [each.batch(n * share, share, r * part, (r + 1) * part) for r, each in enumerate(ranks)]
        for n in range(order.batches(share, drop_last=drop_last))
    ]


def test_an_epoch_has_every_sample_once_for_random_data_sets(monkeypatch):
    draw = random.Random(1)
    for _ in range(300):
        # Segments of more than a few samples are large here, and so are steps.
        monkeypatch.setattr(module, "_STEP_MAX", draw.choice([7, 40, 1 << 20]))
        monkeypatch.setattr(module, "_WINDOW_MAX", draw.choice([50, 1 << 23]))
        counts = [draw.choice([0, 1, 3, 10, 40]) for _ in range(draw.randint(1, 12))]
        counts[0] += draw.choice([1, 100])
        lanes, world = draw.randint(1, 5), draw.randint(1, 4)
        size = lanes * world * draw.randint(1, 4)
        order = Order(counts, seed=draw.getrandbits(80), lanes=lanes, shuffle=draw.randint(0, 15))
        drop_last, epoch = draw.random() < 0.5, draw.randint(0, 9)
        found = batches(order, epoch, size, world, drop_last=drop_last)
        assert all(len(part) == size // world for batch in found for part in batch)
        seen = [int(n) for batch in found for part in batch for n in part]
        total = sum(counts)
        if drop_last:
            # Less than a share is left out of the shortest lane, and one sample more of others.
            assert len(set(seen)) == len(seen) > total - size - lanes
            assert set(seen) <= set(range(total))
        else:
            assert sorted(seen[:total]) == list(range(total))
            first, fill = seen[: min(size, total)], seen[total:]
            assert len(fill) < size
            assert fill == [first[n % len(first)] for n in range(len(fill))]


def test_no_more_shards_are_in_use_than_the_window_has():
    shards, count, window = 60, 30, 7
    lane = Order([count] * shards, seed=2, lanes=1, shuffle=window).lane(0, 0)
    used, wanted = [], []
    for position in range(shards * count):
        used.append(int(lane.take(position, 1)[0]) // count)
        wanted += [shard for shard in lane.shards(2) if shard not in wanted]
        assert used[-1] in lane.shards(0)
        assert len(wanted) <= len(set(used)) + window + 2
        assert len(lane.shards(2)) == window + 2 or len(wanted) == shards
    first = {shard: used.index(shard) for shard in range(shards)}
    last = {shard: len(used) - 1 - used[::-1].index(shard) for shard in range(shards)}
    in_use = [sum(first[s] <= at <= last[s] for s in range(shards)) for at in range(len(used))]
    assert max(in_use) == window
    mixed = [len({*used[at : at + 64]}) for at in range(len(used) - 64)]
    assert min(mixed) >= window - 1  # from start to end


def test_the_order_never_changes():
    """If it has to, increase VERSION: jobs resume at positions in it."""
    assert module.VERSION == 1
    assert chained(0, 0) == 0xE220A8397B1DCDAF  # as published for splitmix64
    assert chained(0, 1, 2, 3) == 15020427595393229491
    assert permutation(12, 42).tolist() == [4, 1, 10, 6, 2, 8, 3, 11, 9, 0, 7, 5]
    order = Order([5, 0, 9, 2, 7, 4], seed=11, lanes=2, shuffle=2)
    assert [order.lane(n, 3).take(0, 13 + n).tolist() for n in (0, 1)] == [
        [25, 6, 10, 5, 7, 11, 13, 8, 26, 12, 23, 9, 24],
        [17, 14, 19, 15, 22, 18, 1, 0, 4, 16, 2, 3, 21, 20],
    ]
    large = Order([2_000_000, 900_000, 5], seed=2**70, lanes=1, shuffle=6)
    found = Epoch(large, 1).batch(1_500_000, 6, 0, 6).tolist()
    assert found == [1720141, 2605154, 1111802, 682358, 1619581, 2080987]

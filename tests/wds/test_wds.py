"""WebDataset pipelines that read through the cache, with real DataLoader workers."""

import logging
import multiprocessing
import os
import pickle
import re
import sys
from functools import partial

import pytest
import webdataset as wds
from torch.utils.data import DataLoader
from webdataset import tariterators
from webdataset.filters import FilterFunction, pipelinefilter

import shardcache
from shardcache import Cache, ConfigError, ShardNotFoundError
from shardcache.wds import attach, read_through_cache, register, tar_files, tar_samples
from tests.support import caches
from tests.support.tars import make_tar, tar_of
from tests.support.trainingtools import ROOT, DataSet
from tests.wds.test_tar_files import BEFORE_1_0

pytestmark = pytest.mark.filterwarnings("ignore")
SPEC = "s3://lab/train-{0000..0003}.tar"
SHARDS = [make_tar(seed, 5) for seed in range(4)]
KEYS = sorted(f"{seed:04d}-{n:05d}" for seed in range(4) for n in range(5))


@pytest.fixture(autouse=True)
def _objects(origin, monkeypatch):
    monkeypatch.setattr("shardcache.wds._logged", set())
    monkeypatch.setitem(wds.gopen_schemes, "s3", None)  # `register` sets it
    process = multiprocessing.current_process()
    monkeypatch.setattr(process, "_config", {**process._config})  # `register` adds to it
    origin.objects |= {f"s3://lab/train-{seed:04d}.tar": data for seed, data in enumerate(SHARDS)}


def keys(dataset) -> list[str]:
    return sorted(sample["__key__"] for sample in dataset)


def pipeline_of(urls, *stages, **options):
    """Return a pipeline that reads shards, with stages before they are opened."""
    shards = wds.SimpleShardList(urls, **options)
    return wds.DataPipeline(shards, *stages, wds.tarfile_to_samples())


@pytest.mark.parametrize("fast_tar", [True, False])
def test_samples_are_the_same_as_without_the_cache(make_cache, tmp_path, fast_tar):
    for seed, shard in enumerate(SHARDS):
        (tmp_path / f"train-{seed:04d}.tar").write_bytes(shard)

    def samples(dataset):
        return [[each for each in sample.items() if each[0] not in differ] for sample in dataset]

    differ = ("__url__", "__local_path__")
    plain = wds.WebDataset(str(tmp_path / "train-{0000..0003}.tar"), shardshuffle=False)
    expected, cache = samples(plain), make_cache()
    dataset = wds.WebDataset(SPEC, shardshuffle=False)
    assert cache.attach(dataset, fast_tar=fast_tar) is dataset
    assert samples(dataset) == expected
    again = pickle.loads(pickle.dumps(cache.attach(dataset)))  # after it was iterated
    assert samples(again) == expected
    assert len(list(cache.entries())) == len(SHARDS)


def test_every_form_of_a_pipeline_keeps_its_handler(make_cache, origin, tmp_path, caplog):
    del origin.objects["s3://lab/train-0002.tar"]
    cache, go_on = make_cache(), wds.ignore_and_continue
    shards, expand = wds.SimpleShardList(SPEC), tariterators.tar_file_expander
    opener, group = pipelinefilter(tariterators.url_opener), tariterators.group_by_keys
    combined = wds.DataPipeline(shards, wds.split_by_worker, wds.tarfile_to_samples(handler=go_on))
    options = {"shardshuffle": False, "handler": go_on}
    for dataset in (
        wds.WebDataset(SPEC, **options),
        attach(combined, cache),  # again
        wds.DataPipeline(shards, opener(handler=go_on), expand, group),
        wds.WebDataset(SPEC, cache_dir=str(tmp_path), **options),
    ):
        assert keys(attach(dataset, cache)) == [key for key in KEYS if not key.startswith("0002")]
    assert list(tmp_path.glob("*.tar")) == [] and "all shards twice" not in caplog.text
    for wrong, text in (
        (wds.DataPipeline(shards), "no stage of this pipeline opens URLs"),
        (wds.WebLoader(combined, batch_size=None, num_workers=0), "WebDataset itself"),
        ([1, 2, 3], "takes a WebDataset"),
    ):
        with pytest.raises(ConfigError, match=text):
            cache.attach(wrong)


def test_stages_and_a_registered_scheme_work_in_any_pipeline(make_cache, monkeypatch):
    cache, group = make_cache(), tariterators.group_by_keys
    expand, shards = tariterators.tar_file_expander, wds.SimpleShardList(SPEC)
    for stages in ([expand, group], [tar_samples], [tar_files, group]):
        assert keys(wds.DataPipeline(shards, cache.url_opener, *stages)) == KEYS
    monkeypatch.setitem(wds.gopen_schemes, "s3", lambda url, mode, *rest: (url, mode))
    register("s3", make_cache())
    register("s3", cache)  # again
    assert keys(wds.WebDataset(SPEC, shardshuffle=False)) == KEYS
    assert len(list(cache.entries())) == len(SHARDS)
    for arguments in (("s3://lab/x.tar", "wb"), ("s3://lab/_info.json", "rb")):
        assert wds.gopen(*arguments) == arguments  # the former handler still serves these


@pytest.mark.skipif(BEFORE_1_0, reason="this WebDataset forbids nothing")
@pytest.mark.parametrize("url", ["pipe:aws s3 cp s3://lab/train-0000.tar -", "/data/x.tar"])
def test_the_cache_refuses_what_webdataset_forbids(url, make_cache, monkeypatch):
    module, cache = sys.modules["webdataset.gopen"], make_cache(cache_local=True)
    monkeypatch.setattr("shardcache.wds.default_cache", lambda: cache)
    monkeypatch.setattr(module, "gopen", module.gopen)
    monkeypatch.setitem(module.gopen_schemes, "__default__", None)
    read_through_cache(module)
    monkeypatch.setattr(wds.utils, "enforce_security", True)
    with pytest.raises(ValueError, match="unsafe_gopen is False"):
        module.gopen(url)
    for resume in True, False:
        with pytest.raises(ConfigError, match="WDS_SECURE forbids local files and commands"):
            list(cache.attach(pipeline_of([url]), resume=resume))


@pytest.mark.parametrize("resume", [True, False])
def test_an_attached_pipeline_reads_what_webdataset_would_read(make_cache, monkeypatch, resume):
    monkeypatch.setenv("GOPEN_REWRITE", "cloud://=s3://;s3://=s3://wrong/")
    urls = [f"cloud://lab/train-{number:04d}.tar" for number in range(4)]
    dataset = make_cache().attach(pipeline_of(urls, wds.shuffle(9)), resume=resume)
    samples = list(dataset)
    assert keys(samples) == KEYS and {sample["__url__"] for sample in samples} == {*urls}


def test_a_function_for_a_scheme_is_said_to_be_replaced(make_cache, monkeypatch, caplog):
    monkeypatch.setitem(wds.gopen_schemes, "s3", lambda *arguments: arguments)
    assert keys(make_cache().attach(pipeline_of(SPEC))) == KEYS
    assert caplog.text.count("names a function for s3://, which the cache does not call") == 1
    module = sys.modules["webdataset.gopen"]
    monkeypatch.setattr("shardcache.wds.default_cache", make_cache)
    monkeypatch.setattr(module, "gopen", module.gopen)
    monkeypatch.setitem(module.gopen_schemes, "__default__", None)
    read_through_cache(module)
    assert module.gopen("s3://lab/train-0000.tar")[0] == "s3://lab/train-0000.tar"


@pytest.mark.skipif(BEFORE_1_0, reason="this WebDataset has no classes that open shards")
def test_openers_of_the_program_are_not_replaced(make_cache, caplog, tmp_path):
    class Own(wds.cache.StreamingOpen):
        pass

    samples = wds.tariterators.tar_file_expander, wds.tariterators.group_by_keys
    with pytest.raises(ConfigError, match=r"no stage of this pipeline opens URLs .*Own"):
        make_cache().attach(wds.DataPipeline(wds.SimpleShardList(SPEC), Own(), *samples))
    opener = wds.cache.FileCache(str(tmp_path), validator=bool)
    pipeline = wds.DataPipeline(wds.SimpleShardList(SPEC), opener, *samples)
    assert keys(make_cache().attach(pipeline)) == KEYS
    assert "the validator of FileCache is not called" in caplog.text


def test_a_hidden_error_is_logged_once(make_cache, caplog):
    samples = wds.tarfile_to_samples(handler=wds.ignore_and_continue)
    absent = wds.DataPipeline(wds.SimpleShardList("s3://lab/{0..9}.tar"), samples)
    make_cache().attach(absent)
    assert [*absent] == [*absent] == []
    first = [text for text in caplog.messages if "s3://lab/0.tar" in text and "not found" in text]
    none = [text for text in caplog.messages if "none of 10 shards" in text]
    assert len(first) == 1 + len(none) == 3


@pytest.mark.skipif(BEFORE_1_0, reason="this WebDataset cannot batch dicts")
def test_a_batch_can_mix_cached_and_streamed_shards(make_cache):
    cache = make_cache()
    cache.fetch("s3://lab/train-0001.tar")
    dataset = cache.attach(wds.WebDataset(SPEC, shardshuffle=False).batched(10))
    assert [len(batch["__key__"]) for batch in dataset] == [10, 10]


def test_attach_keeps_arguments_and_replaces_only_webdatasets_expander(make_cache, origin):
    del origin.objects["s3://lab/train-0002.tar"]
    errors, calls = [], []
    dataset = wds.WebDataset(
        SPEC,
        shardshuffle=False,
        handler=lambda exn: errors.append(exn) or True,
        select_files=lambda name: name.endswith("txt"),
        rename_files=lambda name: f"x/{name}",
    ).to_tuple("__key__", "txt")
    (first, *_) = make_cache().attach(dataset)
    assert len(errors) == 1 and first[0] == "x/0000-00000"

    def custom(data):
        calls.append("custom")
        return tariterators.tar_file_expander(data)

    for stage in (custom, FilterFunction(custom)):
        opener = pipelinefilter(tariterators.url_opener)(handler=wds.ignore_and_continue)
        pipeline = wds.DataPipeline(wds.SimpleShardList(SPEC), opener, stage)
        files = make_cache().attach(pipeline)
        assert sum("fname" in file for file in files) == 3 * 10
    assert calls == ["custom"] * 2


def test_url_opener_keeps_keys_and_calls_the_handler(make_cache, monkeypatch):
    url, absent = "s3://lab/train-0000.tar", "s3://lab/none.tar"
    cache, seen = make_cache(fill="complete"), []
    monkeypatch.setattr("shardcache.cache.default_cache", lambda: cache)
    assert keys(shardcache.attach(wds.WebDataset(SPEC, shardshuffle=False))) == KEYS
    for opener in (cache.url_opener, shardcache.url_opener):
        urls = [{"url": url, "__worker__": 3}, {"url": absent}, url]
        with_keys, plain = opener(urls, lambda exn: seen.append(exn) or True)
        assert with_keys["__worker__"] == 3
        assert with_keys["url"] == plain["url"] == url
        assert plain["stream"].read() == SHARDS[0]
    assert isinstance(seen[0], ShardNotFoundError) and seen[0].args[-1] == absent
    assert list(cache.url_opener([absent, url], handler=lambda exn: False)) == []
    with pytest.raises(ShardNotFoundError):
        list(cache.url_opener([absent, url]))


@pytest.mark.parametrize("is_attached", [False, True])
def test_a_dropped_shard_is_not_pinned_during_the_next_download(make_cache, origin, is_attached):
    cache = make_cache(fill="complete", prefetch=0)
    in_use: list[int] = []
    real = origin.open

    def look(*args):
        evictable = cache.clean(everything=True, dry_run=True).removed
        in_use.append(len(list(cache.entries())) - len(evictable))
        return real(*args)

    origin.open = look
    shards = wds.SimpleShardList(SPEC)
    for sample in cache.attach(pipeline_of(SPEC)) if is_attached else cache.url_opener(shards):
        sample.clear()
    assert len(in_use) >= len(SHARDS) and max(in_use) == 0
    opener = cache.url_opener(shards)
    stream = next(opener)["stream"]
    opener.close()
    assert stream.read() == SHARDS[0]  # closing the opener does not close the consumer's stream


@pytest.mark.parametrize(
    ("method", "is_registered"),  # a forkserver keeps the environment of its first test
    [("fork", False), ("spawn", False), ("fork", True), ("forkserver", True)],
)
def test_dataloader_workers_share_downloads(
    method, is_registered, s3, bucket, proxy, s3_environment, tmp_path
):
    data, cache = DataSet(s3, bucket, proxy), Cache(tmp_path / "cache")
    dataset = wds.WebDataset(data.spec, shardshuffle=False)
    if is_registered:
        register("s3", cache)
    else:
        cache.attach(dataset)
    if method == "fork":
        assert list(dataset)  # a child must not use the parent's clients
    options = {"multiprocessing_context": method, "persistent_workers": method == "spawn"}
    loader = DataLoader(dataset, batch_size=None, num_workers=2, **options)
    before = cache.stats().opens
    for epoch in (1, 2):
        assert data.complete(keys(loader))
        # Also while persistent workers live.
        assert is_registered or cache.stats().opens == before + epoch * len(data.urls)
    assert data.once()


def three_epochs(dataset) -> list[tuple[str, ...]]:
    return [tuple(sample["__key__"] for sample in dataset) for _ in range(3)]


@pytest.mark.usefixtures("s3_environment")
def test_the_pipeline_of_the_pages_shuffles_shards_in_every_epoch(
    s3, proxy, tmp_path, set_variables
):
    s3.create_bucket("bucket")
    data = DataSet(s3, "bucket", proxy, shards=16, members=1)
    set_variables(HOME=tmp_path)  # of ~/.cache/shards
    codes = []
    for page in ("README.md", "docs/index.md", "docs/integrations.md"):
        code = re.search(r"```python\n(.*?)```", (ROOT / page).read_text("utf-8"), re.DOTALL)[1]
        code = re.sub(r"s3://bucket/.*?\.tar", data.spec, code)
        codes.append(re.sub(r"num_workers=\d", "num_workers=2", code))
    assert len({re.search(r"(?s)\ndataset = .*attach\(dataset\)", code)[0] for code in codes}) == 1
    exec(codes[0], names := {})  # noqa: S102 - our own
    dataset, loader = names["dataset"], names["loader"]
    persistent = DataLoader(dataset, batch_size=None, num_workers=2, persistent_workers=True)
    for epochs in map(three_epochs, (dataset, loader, persistent)):
        assert all(map(data.complete, epochs)) and len({*epochs}) == 3
    seen = []
    for rank in (0, 1):
        set_variables(RANK=rank, WORLD_SIZE=2)
        seen += keys(loader)
    assert data.complete(seen)


webdataset = partial(wds.WebDataset, "s3://lab/{0..9}.tar")
stages = partial(pipeline_of, "s3://lab/{0..9}.tar", wds.split_by_worker)
PIPELINES = {
    "shardshuffle": lambda: webdataset(shardshuffle=100),
    "split by node": lambda: webdataset(shardshuffle=100, nodesplitter=wds.split_by_node),
    "detshuffle": lambda: webdataset(shardshuffle=100, detshuffle=True),
    "not shuffled": lambda: webdataset(shardshuffle=False),
    "resampled": lambda: webdataset(resampled=True, shardshuffle=100).with_epoch(20),
    "stages without a shuffle": stages,
    "stages": lambda: stages(wds.shuffle(100)),
    "list with a seed": lambda: stages(seed=3),
    "list with a seed, shuffle without": lambda: stages(wds.shuffle(100), seed=3),
}
if not BEFORE_1_0:
    PIPELINES |= {
        "shuffle with a seed": lambda: stages(wds.shuffle(9, seed=3)),
        "shuffle of one": lambda: stages(wds.shuffle(1, seed=3)),
        "shuffles with and without": lambda: stages(wds.shuffle(9), wds.shuffle(9, seed=3)),
    }


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_attach_warns_once_of_a_repeated_order(pipeline, make_cache, origin, caplog):
    origin.objects |= {f"s3://lab/{seed}.tar": make_tar(seed, 2) for seed in range(10)}
    cache, dataset = make_cache(), PIPELINES[pipeline]()
    for _ in range(2):
        cache.attach(dataset)
    (first, *others) = three_epochs(dataset)
    repeats = others == [first, first] and first != tuple(sorted(first))
    assert sum("wds.shuffle(100)" in text for text in caplog.messages) == repeats


@pytest.mark.parametrize(
    ("shards", "ranks", "split", "warning"),
    [
        (4, 2, [wds.split_by_node, wds.split_by_worker, wds.shuffle(9)], None),
        (3, 2, [wds.split_by_node, wds.split_by_worker], "2 ranks x 2 workers, so 1 of 4"),
        (1, 1, [wds.split_by_worker], "1 ranks x 2 workers, so 1 of 2"),
        (4, 2, [wds.split_by_worker], "each of the 2 ranks reads all shards"),
        (4, 1, [wds.split_by_node, wds.shuffle(9)], "each of the 2 workers reads all shards"),
        (4, 1, [], "each of the 2 workers reads all shards"),
        (4, 1, [list], None),  # it may split them
        (4, 2, [wds.shuffle(9), wds.split_by_node, wds.split_by_worker], "before it splits them"),
        (4, 2, [wds.split_by_node, wds.shuffle(9), wds.split_by_worker], "before it splits them"),
        (4, 2, [wds.detshuffle(9), wds.split_by_node, wds.split_by_worker], None),
    ],
)
def test_attach_warns_once_of_shards_that_readers_do_not_share(
    shards, ranks, split, warning, make_cache, tmp_path, monkeypatch, set_variables
):
    logger = logging.getLogger("shardcache")
    monkeypatch.setattr(logger, "handlers", [logging.FileHandler(tmp_path / "log")])
    set_variables(RANK=0, WORLD_SIZE=ranks)
    paths = [tmp_path / f"{seed}.tar" for seed in range(shards)]
    for path, shard in zip(paths, SHARDS, strict=False):
        path.write_bytes(shard)
    dataset = pipeline_of([*map(str, paths)], *split)
    for _ in range(2):
        make_cache().attach(dataset)
    loader = DataLoader(dataset, batch_size=None, num_workers=2)
    assert list(loader) and list(loader)
    log = (tmp_path / "log").read_text()
    assert len(log.splitlines()) == bool(warning) and (warning or "") in log


@pytest.mark.parametrize("through", ["attach", "gopen"])
@pytest.mark.parametrize(
    ("variables", "hint"),
    [
        ({"SLURM_PROCID": 1, "SLURM_NTASKS": 2, "SLURM_STEP_ID": 0}, "os.environ['SLURM_PROCID']"),
        ({"PMI_RANK": 1, "PMI_SIZE": 2}, "os.environ['PMI_SIZE']"),
        ({"WORLD_SIZE": 2}, "only one of RANK and WORLD_SIZE is set"),
        ({"PMI_RANK": 0, "PMI_SIZE": 1}, None),
        ({"PMI_RANK": 1, "PMI_SIZE": 2, "RANK": 1, "WORLD_SIZE": 2}, None),
    ],
)
def test_a_rank_that_webdataset_does_not_see_is_named_once(
    variables, hint, through, make_cache, set_variables, caplog
):
    set_variables(**variables)
    cache, dataset = make_cache(), pipeline_of(SPEC, wds.split_by_node)
    if through == "attach":
        cache.attach(dataset)
    else:
        register("s3", cache)
    assert len(keys(dataset)) == len(keys(dataset)) == (20 if "RANK" not in variables else 10)
    warned = caches.warnings(caplog)
    assert len(warned) == bool(hint) and all(hint in each for each in warned)


@pytest.mark.parametrize(
    ("kind", "options"), [("nfs4", {}), ("ext4", {}), ("lustre", {"cache_local": True})]
)
def test_attach_warns_once_of_shards_on_a_network_filesystem(
    kind, options, make_cache, tmp_path, monkeypatch, caplog
):
    (tmp_path / "mounts").write_text(f"41 22 0:40 / {tmp_path}/nas rw - {kind} nas:/export rw\n")
    monkeypatch.setattr("shardcache.locks.mounts._MOUNTINFO", tmp_path / "mounts")
    cache = make_cache(locks="flock", **options)
    for _ in range(2):
        for form in ("{}", "file://{}"):
            cache.attach(wds.WebDataset(form.format(f"{tmp_path}/nas/a.tar"), shardshuffle=False))
    assert sum("read in place" in text for text in caplog.messages) == (kind == "nfs4")


def test_attach_expands_patterns_and_an_open_says_how_to(s3, bucket, s3_environment, tmp_path):
    for number, name in enumerate(("b/c.tar", "b/a.tar", "odd *,.tar")):
        s3.put(bucket, name, SHARDS[number])
    cache, b = Cache(tmp_path / "cache"), f"s3://{bucket}/b"
    orders = {"odd *,.tar": "2", "b/*.tar": "10", "b/{c,a}*.tar": "01", "b/": "10"}
    for url, order in orders.items():
        urls = [f"s3://{bucket}/{url}"] if url.endswith("/") else f"s3://{bucket}/{url}"
        found = [sample["__key__"][3] for sample in cache.attach(pipeline_of(urls))]
        assert found == [digit for digit in order for _ in range(5)], url
    for number, name in enumerate(("a?.tar", "ab.tar")):  # on a disk, it is no pattern
        (tmp_path / name).write_bytes(SHARDS[number])
    assert keys(cache.attach(pipeline_of([f"{tmp_path}/a?.tar"]))) == KEYS[:5]
    with pytest.raises(ShardNotFoundError, match="nothing matches"):
        cache.attach(wds.WebDataset(f"{b}/x*.tar", shardshuffle=False))
    for url in (f"{b}/a*.tar", f"{tmp_path}/*.tar", f"{b}/none/"):
        with pytest.raises(ConfigError, match=re.escape("shardcache.expand(SPEC) returns")):
            cache.open(url)
    assert shardcache.expand(f"{b}/a*.tar", cache) == [f"{b}/a.tar"]


def test_a_second_copy_in_the_cache_of_webdataset_is_named(make_cache, tmp_path, caplog):
    (tmp_path / "own").mkdir()
    register("s3", make_cache())
    dataset = wds.WebDataset(SPEC, shardshuffle=False, cache_dir=str(tmp_path / "own"))
    assert keys(dataset) == KEYS
    assert caplog.text.count("all shards twice") == 1


def test_a_cache_that_cannot_be_pickled_stops_no_spawned_process(make_cache, monkeypatch, caplog):
    register("s3", make_cache(validate=lambda _path: None))
    process = multiprocessing.get_context("spawn").Process(target=os.getpid)
    process.start()
    process.join()
    assert process.exitcode == 0 and "spawned do not read s3:// through the cache" in caplog.text


def test_a_key_that_comes_back_in_a_stream_is_named_once(make_cache, origin, caplog):
    names = [f"\udcff/{each}" for each in ("c.x", "c.y.z", "d.x", "d.y", "c.w", "d.w")]
    names.insert(3, "noext")
    origin.objects["s3://lab/mixed.tar"] = tar_of([(name, b"1") for name in names])
    for number in range(3):  # other shards may have its keys
        origin.objects[f"s3://lab/{number}.tar"] = tar_of([("c.x", b"1"), ("d.x", b"1")])
    urls = [f"s3://lab/{name}.tar" for name in (0, 1, "mixed", 2)]
    dataset = make_cache().attach(wds.WebDataset(urls, shardshuffle=False))
    assert [len(list(dataset)) for _ in range(2)] == [10, 10]
    (text,) = (record.getMessage() for record in caplog.records if "again" in record.message)
    assert text.startswith("s3://lab/mixed.tar: the key \\udcff/c occurs again after other keys")

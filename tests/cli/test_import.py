"""``shardcache import`` and `Cache.add`: files of this machine become cached shards."""

import fcntl
import os
import re
import signal
import stat
import time
from pathlib import Path

import pytest

from shardcache.download import worker
from shardcache.errors import IntegrityError
from tests.support.storetools import together, wait_until
from tests.support.tars import make_tar

MIB = 1 << 20


@pytest.fixture
def folder(data, tmp_path):
    """A directory with the shards of the bucket."""
    (tmp_path / "local").mkdir()
    for name, content in data.items():
        (tmp_path / "local" / name).write_bytes(content)
    return tmp_path / "local"


@pytest.fixture
def url(bucket, data, s3_environment):
    return f"s3://{bucket}/train-0000.tar"


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_matching_files_become_entries_without_a_download(run, folder, bucket, url, proxy):
    code, out, _ = run("import", folder, f"s3://{bucket}/", "-n")
    assert code == 0 and "0 cached, 4 to import" in out and run("ls")[0] == 2
    (folder / "notes.txt").write_text("no shard")
    (folder / "old.tar").mkdir()
    os.utime(folder / "train-0000.tar", (0, 0))  # a file of any time is linked
    code, out, err = run("import", folder, f"s3://{bucket}")
    assert (code, err) == (0, "") and "Imported 4 of 4 shards" in out and "4 imported" in out
    assert not proxy.fetches() and run("verify")[0] == 0
    path = Path(run("path", url)[1].strip())
    assert path.samefile(folder / path.name) and mode(path) == 0o444
    assert "All 4 shards cached" in run("import", folder, f"s3://{bucket}/")[1]
    found = run.json("import", "-n", folder.parent, f"s3://{bucket}/", code=3)
    assert len(found["shards"]) == 4  # without those of the cache
    run.out("clean", "--all", "-y")
    assert not path.exists() and len(list(folder.glob("train*.tar"))) == 4


def test_other_files_are_named_and_stay_as_they_are(run, folder, bucket, url, data, proxy):
    files = [folder / name for name in data]
    files[1].write_bytes(data["train-0001.tar"][:-512])
    files[2].write_bytes(data["train-0002.tar"].replace(b"2/", b"3/"))
    files[3].rename(folder / "absent.tar")
    Path(os.fsdecode(b"%s/\xff.tar" % os.fsencode(folder))).touch()  # a name that is no text
    code, out, err = run("import", folder, f"s3://{bucket}/", "-n")
    assert code == 3 and "0 cached, 1 to import" in out and run("ls")[0] == 2
    for path, why in (files[1], "the object has"), (files[2], "the checksum or ETag at"):
        assert re.search(rf"{path} \(\d+ bytes\) is not imported: {why}", err)
    assert "absent.tar: not found" in err and ".tar' is not UTF-8" in err
    code, out, again = run("import", folder, f"s3://{bucket}/")
    assert code == 3 and "Imported 1 of 5 shards" in out and "4 failed" in out and again == err
    assert mode(files[2]) == 0o644 and run("verify")[0] == 0
    shards = run.json("import", folder, f"s3://{bucket}/", code=3)["shards"]
    assert [shard["outcome"] for shard in shards] == ["failed", "cached", *["failed"] * 3]
    run.out("import", folder, f"s3://{bucket}/", "--max-failures", "4")
    assert not proxy.fetches()
    err = run.err("import", folder, "s3://absent-bucket/", code=3)
    assert "s3://absent-bucket/absent.tar: not found (" in err


def test_a_dry_run_may_have_files_for_some_shards(open_cache, folder, url, bucket):
    cache = open_cache()
    sources = {cache.parse(url).key: folder / "train-0001.tar"}
    report = cache.prewarm([url, f"s3://{bucket}/train-0002.tar"], sources=sources, dry_run=True)
    assert (report.failed, report.missing) == (1, 1)


def test_another_file_than_the_cached_shard_is_refused(run, open_cache, folder, url, data):
    file, other, same = folder / "train-0000.tar", folder / "other", folder / "same"
    cache = open_cache()
    entry = cache.add(url, file)
    same.write_bytes(data[file.name])
    assert cache.add(url, same).directory == cache.add(url, file).directory == entry.directory
    for content in (data["train-0001.tar"], data[file.name][:-1]):
        other.write_bytes(content)
        with pytest.raises(IntegrityError, match="is cached with other bytes"):
            cache.add(url, other)
    other.replace(file)
    code, out, err = run("import", folder, url.rpartition("/")[0])
    assert code == 3 and "Imported 3 of 4 shards" in out and "is cached with other bytes" in err
    assert cache.open(url).read() == data[file.name]
    (entry.path / "meta.json").write_bytes(b"{}")  # even without its sidecar
    assert cache.add(url, same).directory == entry.directory
    with pytest.raises(IntegrityError, match="is cached with other bytes"):
        cache.add(url, file)


@pytest.mark.parametrize("part", [5, 8])
@pytest.mark.usefixtures("s3_environment")
def test_the_etag_of_a_multipart_upload_is_compared(s3, bucket, open_cache, tmp_path, part):
    content, client = make_tar(1, 80, 70_000), s3.client()
    where = {"Bucket": bucket, "Key": "big.tar"}
    upload = {**where, "UploadId": client.create_multipart_upload(**where)["UploadId"]}
    parts = []
    for number, at in enumerate(range(0, len(content), part * MIB), 1):
        body = content[at : at + part * MIB]
        tag = client.upload_part(**upload, PartNumber=number, Body=body)["ETag"]
        parts.append({"ETag": tag, "PartNumber": number})
    done = client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})
    assert done["ETag"].endswith(f'-{len(parts)}"') and len(parts) > 1
    file = tmp_path / "big.tar"
    file.write_bytes(content[:-1] + b"x")
    cache = open_cache()
    with pytest.raises(IntegrityError, match="is not imported"):
        cache.add(f"s3://{bucket}/big.tar", file)
    file.write_bytes(content)
    assert cache.add(f"s3://{bucket}/big.tar", file).data.samefile(file)


def test_a_file_that_may_still_change_is_copied(open_cache, folder, url, data):
    file = folder / "train-0000.tar"
    with file.open("r+b") as writer:
        entry = open_cache().add(url, file)
        assert file.stat().st_nlink == 1
        writer.write(b"changed")
    assert not entry.data.samefile(file) and mode(file) == 0o644 and mode(entry.data) == 0o400
    assert entry.data.read_bytes() == data[file.name] != file.read_bytes()


def test_a_file_that_is_not_imported_may_be_written_again(open_cache, folder, url):
    file = folder / "train-0000.tar"
    with file.open() as reader:
        fcntl.flock(reader, fcntl.LOCK_EX)
        with pytest.raises(OSError, match="vanished"):
            open_cache().add(url, file)
    assert mode(file) == 0o644


def test_an_interrupted_import_leaves_the_file_as_it_was(open_cache, folder, url, monkeypatch):
    file, real = folder / "train-0000.tar", worker.identify

    def identify(*args):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.5)
        return real(*args)

    monkeypatch.setattr(worker, "identify", identify)
    cache = open_cache()
    with pytest.raises(KeyboardInterrupt):
        cache.add(url, file)
    wait_until(lambda: mode(file) == 0o644)
    assert cache.path(url) is None


def test_a_file_that_changes_during_its_copy_is_not_imported(open_cache, folder, url, monkeypatch):
    file, sendfile = folder / "train-0000.tar", os.sendfile
    with file.open("r+b") as writer:  # so that it is copied

        def copy(*args):
            writer.write(b"changed")
            writer.flush()
            return sendfile(*args)

        monkeypatch.setattr("os.sendfile", copy)
        cache = open_cache()
        with pytest.raises(IntegrityError, match="is not imported"):
            cache.add(url, file)
    assert cache.path(url) is None and not list((cache.dir / "v1/partial").iterdir())


def test_two_processes_import_one_file_at_once(open_cache, folder, url, proxy):
    file = folder / "train-0000.tar"
    paths = together(2, lambda number: str(open_cache().add(url, file).data))
    assert paths[0] == paths[1] and Path(paths[0]).samefile(file) and not proxy.fetches()
    assert file.stat().st_nlink == 2

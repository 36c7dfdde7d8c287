"""fsspec's own tests of a filesystem, over three targets."""

import os

import fsspec
import pytest
from fsspec.tests.abstract import AbstractFixtures, AbstractGetTests, AbstractOpenTests


class Writable(fsspec.get_filesystem_class("shardcache")):
    """Passes writing on to the target, because the tests make their files through it."""

    def _open(self, path, mode="rb", **options):
        return super()._open(path, mode, **options) if mode == "rb" else self.fs.open(path, mode)


for name in "makedirs", "mkdir", "pipe", "rm", "touch":
    setattr(
        Writable, name, lambda self, *args, _name=name, **kw: getattr(self.fs, _name)(*args, **kw)
    )


#: Tests that run over fewer targets.
FEWER = {
    "test_get_glob_edge_cases": ["memory"],  # the target itself matches patterns, and there are 32
    "test_open_exclusive": ["memory", "file"],  # s3fs refuses it when the file is closed
}


class TestThroughTheCache(AbstractGetTests, AbstractOpenTests, AbstractFixtures):
    def pytest_generate_tests(self, metafunc):
        targets = FEWER.get(metafunc.function.__name__, ["memory", "file", "s3"])
        metafunc.parametrize("target", targets, indirect=True)

    @pytest.fixture
    def target(self, request):
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        if request.param == "s3":
            request.getfixturevalue("s3_environment")
        return request.param

    @pytest.fixture
    def fs_path(self, target, request, tmp_path):
        return request.getfixturevalue("bucket") if target == "s3" else str(tmp_path / "root")

    @pytest.fixture
    def fs(self, target, tmp_path):
        options = {"auto_mkdir": True} if target == "file" else {}
        return Writable(target, options, dir=str(tmp_path / "cache"))

    @pytest.fixture
    def supports_empty_directories(self, target):
        return target != "s3"

    @pytest.fixture
    def local_path(self, tmp_path):
        (tmp_path / "local").mkdir()
        return os.fspath(tmp_path / "local")

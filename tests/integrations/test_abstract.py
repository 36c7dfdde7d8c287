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


class TestThroughTheCache(AbstractGetTests, AbstractOpenTests, AbstractFixtures):
    def pytest_generate_tests(self, metafunc):
        # The target itself matches patterns, of which fsspec tests 32.
        has_patterns = metafunc.function.__name__ == "test_get_glob_edge_cases"
        targets = ["memory"] if has_patterns else ["memory", "file", "s3"]
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

    def test_open_exclusive(self, fs, fs_target, target, request):
        if target == "s3":
            request.applymarker(pytest.mark.xfail(reason="s3fs refuses it when the file is closed"))
        super().test_open_exclusive(fs, fs_target)

    @pytest.fixture
    def local_path(self, tmp_path):
        (tmp_path / "local").mkdir()
        return os.fspath(tmp_path / "local")

"""fsspec's own tests of `get`, over three targets."""

import fsspec
import pytest
from fsspec.tests.abstract import AbstractFixtures, AbstractGetTests


class Writable(fsspec.get_filesystem_class("shardcache")):
    """Passes writing on to the target, because the tests make their files through it."""


for name in "makedirs", "mkdir", "pipe", "rm", "touch":
    setattr(
        Writable, name, lambda self, *args, _name=name, **kw: getattr(self.fs, _name)(*args, **kw)
    )


class TestThroughTheCache(AbstractGetTests, AbstractFixtures):
    def pytest_generate_tests(self, metafunc):
        # The target itself matches patterns, and there are 32 of them.
        is_glob = metafunc.function.__name__ == "test_get_glob_edge_cases"
        targets = ["memory"] if is_glob else ["memory", "file", "s3"]
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

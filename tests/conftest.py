"""Loads the fixtures of `tests.support`."""

import fcntl
import os

import hypothesis

# Pythons of uv and conda, which are built on an old system, do not have these.
for _module, _name in ((os, "memfd_create"), (fcntl, "F_OFD_GETLK"), (fcntl, "F_OFD_SETLK")):
    vars(_module).pop(_name, None)

if hypothesis.settings.default.deadline is not None:  # a slow machine must not fail a test
    hypothesis.settings.register_profile("patient", deadline=None)
    hypothesis.settings.load_profile("patient")

pytest_plugins = ["tests.support.fixtures", "tests.support.clitools"]

"""Loads the fixtures of `tests.support`."""

import hypothesis

if hypothesis.settings.default.deadline is not None:  # a slow machine must not fail a test
    hypothesis.settings.register_profile("patient", deadline=None)
    hypothesis.settings.load_profile("patient")

pytest_plugins = ["tests.support.fixtures", "tests.support.clitools"]

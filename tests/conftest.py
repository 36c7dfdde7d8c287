"""What every test gets: the fixtures are in `tests.support.fixtures`."""

import hypothesis

if hypothesis.settings.default.deadline is not None:  # a slow machine is no failure
    hypothesis.settings.register_profile("patient", deadline=None)
    hypothesis.settings.load_profile("patient")

pytest_plugins = [
    "tests.support.fixtures",
    "tests.support.clitools",
]

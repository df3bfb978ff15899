"""What all tests share: a cache folder of their own, and no deadlines."""

from __future__ import annotations

import os
from collections.abc import Iterator

if "PYTEST_XDIST_WORKER" in os.environ:  # one thread for each worker; read when torch is imported
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import datasets
import pytest
from hypothesis import settings

# The first call of a compiled loop compiles or loads it, which takes longer than any of the calls after it.
settings.register_profile("dagpack", deadline=None)
settings.load_profile("dagpack")


@pytest.fixture(scope="session", autouse=True)
def cache_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the tests, and the processes they start, from reading or writing the user's cache."""
    folder = str(tmp_path_factory.mktemp("datasets"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DATASETS_CACHE", folder)
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
        yield


@pytest.fixture(autouse=True)
def progress_bars_as_they_were() -> Iterator[None]:
    """What one test switches off, as programs do that print nothing else, is on for the next."""
    yield
    datasets.enable_progress_bars()

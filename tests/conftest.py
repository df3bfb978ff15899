"""What all tests share: a cache folder of their own, no deadlines, and which of them need the checkout."""

from __future__ import annotations

import os
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import PurePath

if "PYTEST_XDIST_WORKER" in os.environ:  # one thread for each worker; read when torch is imported
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import datasets
import pytest
from hypothesis import settings

# The first call of a compiled loop compiles or loads it, which takes longer than any of the calls after it.
settings.register_profile("dagpack", deadline=None)
settings.load_profile("dagpack")

CHECKOUT = (
    "test_accelerate_configs.py::*",
    "test_benchmarks.py::*",
    "test_flex.py::test_memory_grows_with_the_pairs_of_tiles*",
    "test_gpu_benchmark.py::*",
    "test_notebook.py::*",
    "test_ray.py::test_the_example_of_the_page",
    "test_recipe.py::*config*",
    "test_recipe.py::test_help",
    "test_recipe.py::test_smoke*",
    "test_redact.py::test_less_than_one_in_two_hundred_lines_of_code_and_prose_change",
    "test_render_spans.py::test_a_mask_differs*",
    "test_render_spans.py::test_differences_are_told_by_their_place",
    "test_render_spans.py::test_real_tokenizers_differ_alike*",
    "test_render_spans.py::test_the_benchmark_runs",
    "test_render_spans.py::test_the_page_shows_the_differences",
    "test_sample.py::test_the_tokenizer_is_the_one_of_these_sessions",
    "test_world_model.py::*",
)
"""Tests that read recipes, benchmarks, notebooks, pages or the package's source beside them: mark `checkout`."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs the checkout, beside the tests that say so themselves."""
    for item in items:
        file, _, test = item.nodeid.partition("::")
        if any(fnmatch(f"{PurePath(file).name}::{test}", pattern) for pattern in CHECKOUT):
            item.add_marker("checkout")


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

"""Functions that only Linux has, and the fallbacks where it is hidden."""

import os
from pathlib import Path

import pytest

from feedmill.shared import linux


@pytest.fixture
def hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the C library, /proc and CPU affinity, as on macOS."""
    monkeypatch.setattr(linux, "LIBC", object())
    monkeypatch.setattr(linux, "PROC", Path("/missing"))
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.delattr(os, "sched_setaffinity")


def test_measures_this_process() -> None:
    assert linux.allowed_cpus() == os.sched_getaffinity(0)
    assert linux.process_namespace()
    assert linux.processor()
    assert (
        0
        < linux.available_memory()
        <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    )


@pytest.mark.usefixtures("hidden")
def test_falls_back_elsewhere() -> None:
    assert linux.allowed_cpus() == set(range(os.cpu_count() or 1))
    assert linux.process_namespace() == ""
    assert linux.processor() is None
    assert linux.available_memory() == os.sysconf("SC_PHYS_PAGES") * os.sysconf(
        "SC_PAGE_SIZE"
    )
    linux.run_on({0})
    linux.set_malloc_options({-1: 1})
    linux.return_freed_memory()
    linux.die_with(os.getppid())

"""The version is the installed package's, and the metrics work without an installed package."""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING

from warmfleet.metrics import Metrics
from warmfleet.version import version

if TYPE_CHECKING:
    import pytest


def test_it_is_that_of_the_installed_package() -> None:
    assert version() == metadata.version("warmfleet")


def test_a_source_tree_that_nobody_installed_has_metrics_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    version.cache_clear()
    monkeypatch.setattr(metadata, "version", missing)
    try:
        (told,) = [metric for metric in Metrics().registry.collect() if metric.name == "warmfleet_build_info"]
        assert told.samples[0].labels["version"] == "(not installed)"
    finally:
        version.cache_clear()

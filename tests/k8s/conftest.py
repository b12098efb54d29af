"""Rendered manifests, an API server to apply them to, and the program's own routes and settings."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import TYPE_CHECKING

import pytest
from starlette.routing import Route
from tests.k8s.fake_api import FakeApi
from tests.k8s.policies import Program
from tests.k8s.render import COMBINATIONS, ROOT, render

from warmfleet.main import create_app
from warmfleet.prompt.engine_paths import KNOWN
from warmfleet.settings import PREFIX, Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

METRICS = ROOT / "app/docs/metrics.md"  # generated from the program
#: All three probes of an engine ask this endpoint of vLLM.
ENGINE_ROUTES = frozenset({"/health"})


@pytest.fixture
def api() -> Iterator[FakeApi]:
    with FakeApi() as server:
        yield server


@pytest.fixture
def rich_api() -> Iterator[FakeApi]:
    """A cluster with the CRDs of Prometheus' operator and of the Gateway API."""
    with FakeApi(custom=True) as server:
        yield server


@pytest.fixture(scope="session")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Name -> YAML of every combination that is shipped or documented."""
    return {name: render(parts, tmp_path_factory.mktemp(name)) for name, parts in COMBINATIONS.items()}


@pytest.fixture(scope="session")
def program() -> Program:
    doors = create_app(Settings(models=("any",), admin_port=9090))
    small = [route for route in doors.clients.connections.application.starlette.routes if isinstance(route, Route)]
    sources = "".join(path.read_text() for path in (ROOT / "worker_plugin/warmfleet_worker").rglob("*.py"))
    of_router = frozenset(PREFIX + item.name.upper() for item in fields(Settings))
    return Program(
        routes={"router": frozenset({*KNOWN, *(route.path for route in small)}), "engine": ENGINE_ROUTES},
        settings={
            "router": of_router,
            "pools": of_router,
            "engine": frozenset(re.findall(r'"(WARMFLEET_[A-Z_]+)"', sources)),
            "users": frozenset({"WARMFLEET_MODELS"}),
        },
        load_router=Settings.from_environment,
        metrics=frozenset(re.findall(r"^\| `(warmfleet_\w+)`", METRICS.read_text(), re.MULTILINE)),
    )

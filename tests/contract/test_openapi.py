"""The OpenAPI documents name exactly what their ports serve, and hold together."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from jsonschema import Draft202012Validator
from starlette.routing import Route

from warmfleet import errors
from warmfleet.api.openapi.document import PATH
from warmfleet.api.openapi.schemas import body_schema
from warmfleet.api.status_page.routes import FILES
from warmfleet.main import create_app
from warmfleet.prompt.engine_paths import KNOWN, OWN, EnginePaths
from warmfleet.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from warmfleet.api.listening.server import Door, Doors

KEY = "k" * 16


def doors(**chosen: Any) -> Doors:
    """The applications of a replica with one port, or with a port for operators."""
    return create_app(Settings(models=("any",), **({"admin_port": 0} | chosen)))


def routes(door: Door) -> list[Route]:
    found = door.connections.application.starlette.routes
    return [route for route in found if isinstance(route, Route)]


async def document(door: Door) -> dict[str, Any]:
    [route] = [route for route in routes(door) if route.path == PATH]
    answer = await route.endpoint(None)
    found: dict[str, Any] = json.loads(answer.body)
    return found


def operations(found: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, item in found["paths"].items():
        for method, operation in item.items():
            yield path, method.upper(), operation


def served(door: Door) -> set[tuple[str, str]]:
    """Every method of every path of a port that Starlette answers, without HEAD."""
    found = [(route.path.replace(":path}", "}"), route.methods or set()) for route in routes(door)]
    return {(path, method) for path, methods in found for method in methods if method != "HEAD"}


async def test_the_document_has_every_path_that_is_served_and_no_other() -> None:
    found = {(path, method) for path, method, _ in operations(await document(doors(passed_paths=()).clients))}
    engines = {(known.path, method) for known in EnginePaths(()).all() for method in known.methods}
    assert found == served(doors().clients) | engines
    kept = {"/v1/models/{model}", "/v1/responses/{response_id}", "/v1/responses/{response_id}/cancel"}
    assert {path for path, _ in found} - kept == {*KNOWN, *OWN}


async def test_the_operators_port_has_a_document_of_its_own() -> None:
    apart = doors(admin_port=9_090)
    inside, outside = await document(apart.operators), await document(apart.clients)
    assert {(path, method) for path, method, _ in operations(inside)} == served(apart.operators)
    assert {"/workers", "/route", PATH} <= inside["paths"].keys()
    assert "/workers" not in outside["paths"]
    assert "/v1/completions" not in inside["paths"]


async def test_paths_of_the_operators_patterns_are_named() -> None:
    found = await document(doors(passed_paths=("/v1/images/*", "/v1/moderations")).clients)
    for path in ("/v1/images/{path}", "/v1/moderations"):
        assert found["paths"][path].keys() == {"get", "post"}
    assert found["paths"]["/v1/images/{path}"]["get"]["parameters"][0]["name"] == "path"


async def test_every_reference_has_a_target_and_every_schema_is_one() -> None:
    found = await document(doors().clients)
    text = json.dumps(found)
    for reference in set(re.findall(r'"\$ref": "#/([^"]+)"', text)):
        place: Any = found
        for part in reference.split("/"):
            place = place[part]
        assert place, reference
    for path, method, operation in operations(found):
        named = {parameter["name"] for parameter in operation.get("parameters", ()) if parameter.get("in") == "path"}
        assert named == set(re.findall(r"{(\w+)}", path)), (path, method)
        assert {"400", "404", "405"} <= operation["responses"].keys()
        for content in operation.get("requestBody", {}).get("content", {}).values():
            Draft202012Validator.check_schema(content["schema"])


async def test_keys_are_named_where_they_are_needed(tmp_path: Any) -> None:
    keys = tmp_path / "keys"
    keys.write_text("")
    found = await document(doors(client_keys_file=str(keys), admin_key=KEY).clients)
    keyed = {path for path, _, operation in operations(found) if "security" in operation}
    open_paths = {"/health", "/ping", "/version", "/livez", "/readyz", "/favicon.ico", PATH, *FILES}
    assert keyed == found["paths"].keys() - open_paths
    open_to_all = await document(doors().clients)
    assert not [path for path, _, operation in operations(open_to_all) if "security" in operation]


def classes(above: type[errors.WarmfleetError]) -> Iterator[type[errors.WarmfleetError]]:
    for error in above.__subclasses__():
        if error.__module__ == errors.__name__:  # others never reach a client
            yield error
        yield from classes(error)


async def test_every_error_that_clients_can_cause_is_in_the_document() -> None:
    found = await document(doors().clients)
    told = json.dumps(found["components"]["responses"]) + json.dumps(found["paths"])
    internal = {errors.WarmfleetError, errors.BadArgument, errors.UpstreamError}
    assert [
        error.code for error in classes(errors.WarmfleetError) if error not in internal and error.code not in told
    ] == []


@pytest.mark.parametrize(
    ("chosen", "body", "fits"),
    [
        ({}, {"prompt": "x"}, True),
        ({}, {"prompt": [[1, 2], "x"]}, True),
        ({}, {"prompt": {}}, False),
        ({}, {"prompt": "x", "n": "1", "stream": 0}, True),
        ({}, {"prompt": "x", "n": [1]}, False),
        ({}, {"prompt": "x", "chat_template": "x"}, False),
        ({"allowed_fields": ("chat_template",)}, {"prompt": "x", "chat_template": "x"}, True),
        ({}, {"prompt": "x", "priority": "high"}, True),
        ({"queue_priority": True}, {"prompt": "x", "priority": ["high"]}, False),
    ],
)
def test_a_body_fits_the_schema_as_the_settings_say(chosen: dict[str, Any], body: dict[str, Any], fits: bool) -> None:
    schema = body_schema(KNOWN["/v1/completions"], Settings(models=("any",), **chosen))
    assert Draft202012Validator(schema).is_valid(body) == fits

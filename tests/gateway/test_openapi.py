"""The OpenAPI description agrees with the gateway:

- it names exactly the gateway's routes and methods, with a trainer's calls where the gateway has them
- it is valid OpenAPI 3.1, and every reference in it resolves
- the gateway knows every parameter that it names, and no other parameter of OpenAI's
- it is what `/openapi.json` serves, without a key
"""

from collections.abc import Iterator
from typing import Any, cast, get_type_hints

import pytest
import schemathesis
from aiohttp import web
from openai.types import chat, completion_create_params, responses

from areal_agent.gateway.openapi import openapi_document

from .conftest import ADMIN_KEY, Agent, OpenAgent, OpenWorld

DOCUMENT = openapi_document(is_leased_from=False)


def described(document: dict[str, Any]) -> set[tuple[str, str]]:
    return {(method.upper(), path) for path, item in document["paths"].items() for method in item}


def served(app: web.Application) -> set[tuple[str, str]]:
    return {
        (route.method, route.resource.canonical)
        for route in app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }


def values(tree: object, key: str) -> Iterator[Any]:
    """Everything that stands under `key` anywhere in a document."""
    if isinstance(tree, dict):
        for name, value in cast("dict[str, Any]", tree).items():
            if name == key:
                yield value
            yield from values(value, key)
    elif isinstance(tree, list):
        for value in cast("list[Any]", tree):
            yield from values(value, key)


class Trainers:
    """Stands where a consumer stands: the routes name its methods and call none."""

    publish = acknowledge = drop = None


@pytest.mark.parametrize("options", [{}, {"consumer": Trainers()}], ids=["alone", "leased from"])
async def test_it_names_every_route(open_world: OpenWorld, options: dict[str, Any]) -> None:
    world = await open_world(**options)
    assert described(openapi_document(is_leased_from=bool(options))) == served(world.gateway.app())


@pytest.mark.parametrize("is_leased_from", [False, True])
def test_it_is_valid(is_leased_from: bool) -> None:
    schemathesis.openapi.from_dict(openapi_document(is_leased_from=is_leased_from)).validate()


def test_every_reference_leads_somewhere() -> None:
    document = openapi_document(is_leased_from=True)
    references = set(values(document, "$ref"))
    assert references
    for reference in references:
        place: Any = document
        for step in reference.removeprefix("#/").split("/"):
            place = place[step]


def test_operations_have_names_of_their_own() -> None:
    names = list(values(openapi_document(is_leased_from=True)["paths"], "operationId"))
    assert len(names) == len(set(names)) == len(described(openapi_document(is_leased_from=True)))


async def is_known(agent: Agent, path: str, name: str) -> bool:
    """Return whether the gateway knows a parameter; it may refuse its value, but not its name."""
    key = ADMIN_KEY if DOCUMENT["paths"][path]["post"]["security"] == [{"adminKey": []}] else agent.key
    _, answer = await agent.world.call(path, {name: False}, key=key)
    error = answer.get("error")
    return not isinstance(error, dict) or error.get("code") != "unknown_parameter"


def posted() -> list[tuple[str, list[str]]]:
    """Every path that takes a body, and the parameters that it is described with."""
    found: list[tuple[str, list[str]]] = []
    for path, item in DOCUMENT["paths"].items():
        if "requestBody" in item.get("post", {}):
            name = item["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
            found.append((path, list(DOCUMENT["components"]["schemas"][name]["properties"])))
    return found


@pytest.mark.parametrize(("path", "names"), posted(), ids=lambda value: value if isinstance(value, str) else "")
async def test_it_names_what_the_gateway_knows(open_agent: OpenAgent, path: str, names: list[str]) -> None:
    agent = await open_agent()
    for name in names:
        assert await is_known(await agent.world.start(), path, name), name  # a session each: one of them may end it
    assert not await is_known(agent, path, "no_such_parameter")


@pytest.mark.parametrize(
    ("path", "params"),
    [
        ("/v1/chat/completions", chat.completion_create_params.CompletionCreateParamsBase),
        ("/v1/completions", completion_create_params.CompletionCreateParamsBase),
        ("/v1/responses", responses.response_create_params.ResponseCreateParamsBase),
    ],
)
async def test_of_openais_it_names_those_that_are_known(open_agent: OpenAgent, path: str, params: type) -> None:
    agent = await open_agent()
    names = dict(posted())[path]
    for name in get_type_hints(params):
        assert await is_known(agent, path, name) == (name in names), name


async def test_it_is_served(open_world: OpenWorld) -> None:
    world = await open_world()
    async with world.http.get(f"{world.url}/openapi.json") as response:
        assert response.status == 200
        assert await response.json() == DOCUMENT

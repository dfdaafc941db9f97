"""The calls that start, reward, end and export sessions."""

from typing import Any

from areal_agent.gateway.openapi.parts import JsonSchema

SCHEMAS: dict[str, JsonSchema] = {}
PATHS: dict[str, Any] = {}

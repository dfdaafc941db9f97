"""Fixtures of the gateway's tests, for clients that are programs of their own."""

from tests.gateway.conftest import backend, open_agent, open_world, renderer

__all__ = ["backend", "open_agent", "open_world", "renderer"]

"""What tests of the gateway have made: a served gateway with a scripted engine, and a session of it."""

from tests.gateway.conftest import backend, open_agent, open_world, renderer

__all__ = ["backend", "open_agent", "open_world", "renderer"]

"""What tests of the gateway have made: a served gateway with a scripted engine, a session of it, and a ledger."""

from tests.gateway.conftest import backend, ledger, open_agent, open_world, renderer

__all__ = ["backend", "ledger", "open_agent", "open_world", "renderer"]

"""Who calls: the session of a key, or the admin. A session's key reaches its own session and nothing else."""

from aiohttp import web

from areal_agent.errors import RequestError
from areal_agent.gateway.auth import caller_hash, is_same_key, key_hash
from areal_agent.gateway.session import Session
from areal_agent.gateway.sessions import Sessions

WHERE_THE_ADMIN_KEY_IS = (
    "a gateway that stands alone says where it is when it starts (by default: in the file admin_key, in the folder of "
    "its ledger)"
)


class Callers:
    """Tells callers by the hash of their key."""

    def __init__(self, admin_key: str, sessions: Sessions) -> None:
        self._admin_key_hash = key_hash(admin_key)
        self._sessions = sessions

    def session(self, request: web.Request) -> Session:
        """The session whose key a request came with; raises RequestError when it is that of none."""
        return self._session_of(caller_hash(request.headers))

    def require_admin(self, request: web.Request) -> None:
        caller = caller_hash(request.headers)
        if self._is_admin(caller):
            return
        fault = "this call takes the admin key of the gateway"
        if self._sessions.with_key(caller) is not None:
            raise RequestError(f"{fault}, not that of a session; {WHERE_THE_ADMIN_KEY_IS}", status=403)
        raise RequestError(
            f"{fault}, and the API key is another; {WHERE_THE_ADMIN_KEY_IS}", status=401, code="invalid_api_key"
        )

    def require_any(self, request: web.Request) -> None:
        caller = caller_hash(request.headers)
        if not self._is_admin(caller):
            self._session_of(caller)

    def _session_of(self, caller: str) -> Session:
        session = self._sessions.with_key(caller)
        if session is not None:
            return session
        if self._is_admin(caller):
            raise RequestError("this is the admin key; use the key that /rl/start_session gave", status=403)
        raise RequestError(
            "the API key is not that of any session; use the api_key that /rl/start_session gave",
            status=401,
            code="invalid_api_key",
        )

    def _is_admin(self, caller: str) -> bool:
        return is_same_key(caller, self._admin_key_hash)

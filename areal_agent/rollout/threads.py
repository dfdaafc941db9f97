"""Runs a plain function in a thread of its own while the event loop goes on. It knows not what function.

No pool: the interpreter waits for the threads of a pool when it ends, and one that is stuck in a user's code would keep
the process alive for ever. How many run at once is the caller's business.
"""

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


async def run_in_thread(name: str, call: Callable[[], Result]) -> Result:
    """What `call` returns or raises. Cancelling leaves the thread behind: nothing can end it from outside."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[Result] = loop.create_future()
    context = contextvars.copy_context()

    def work() -> None:
        try:
            result = context.run(call)
        except StopIteration:  # a future cannot hold it
            tell(lambda: outcome.set_exception(RuntimeError("StopIteration was raised")))
        except BaseException as error:
            reason = error  # the name `error` is gone when the loop gets to it
            tell(lambda: outcome.set_exception(reason))
        else:
            tell(lambda: outcome.set_result(result))

    def tell(settle: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile: nobody asks any more
            loop.call_soon_threadsafe(lambda: None if outcome.done() else settle())

    threading.Thread(target=work, name=name, daemon=True).start()
    return await outcome

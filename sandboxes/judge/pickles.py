"""Pickles that may hold plain data only: text, numbers, lists, tuples and dicts. Reading one can run no code."""

import io
import pickle
from typing import Any, NoReturn


class PlainUnpickler(pickle.Unpickler):
    """Refuses everything that has to be looked up by name: classes, functions, and so all that could be called."""

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise pickle.UnpicklingError(f"this pickle asks for {module_name}.{global_name}; only plain data is read")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError("this pickle asks for a persistent object; only plain data is read")


def load_plain(data: bytes) -> Any:
    """The plain data of a pickle; UnpicklingError for anything else.

    >>> load_plain(pickle.dumps([{"input": "1"}]))
    [{'input': '1'}]
    """
    try:
        return PlainUnpickler(io.BytesIO(data)).load()
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # the boundary: a damaged pickle makes the unpickler raise almost anything
        raise pickle.UnpicklingError(f"this is no pickle: {error!r}") from error

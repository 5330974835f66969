"""The errors that memoro raises. Each message says how to fix the problem."""

from __future__ import annotations

from importlib.util import find_spec


def first_line(error: BaseException | None) -> str:
    """What another library's error says, for a message of memoro; the name of its type if it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class MemoroError(Exception):
    """Base of all errors that memoro raises on purpose."""


class BackboneError(MemoroError):
    """memoro does not support the model, or the input does not fit it."""


class TaskError(MemoroError):
    """A task was requested or built with invalid arguments."""


class TaskFileError(MemoroError):
    """A task file cannot be trusted, read or written."""


class CompositionError(MemoroError):
    """These tasks cannot be composed on this backbone."""


class ImageError(MemoroError):
    """An image cannot be read safely."""


class DataError(MemoroError):
    """A set of images cannot be used as it is."""


class TrainingError(MemoroError):
    """Training cannot start or cannot continue."""


class TeachError(MemoroError):
    """The labels of a session cannot be kept, or images cannot be learned from."""


class ServeError(MemoroError):
    """The server cannot start, cannot be reached, or refuses a request: `status` is then its HTTP status."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class CacheError(MemoroError):
    """Features cannot be cached, or exceed the cache budget."""


def need(*modules: str, extra: str = "train") -> None:
    """Raises, with the command that installs it, if a module of an optional extra is missing."""
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        names = f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'}"
        raise MemoroError(f"{names} not installed: pip install 'memoro[{extra}]'.")

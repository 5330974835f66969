"""What memoro raises: one family of errors, each message naming the fix."""


class MemoroError(Exception):
    """Base of all errors that memoro raises on purpose."""


class BackboneError(MemoroError):
    """The model is none that memoro can read, or the input does not fit it."""


class TaskError(MemoroError):
    """A task was asked for, or built, in a way that cannot work."""


class TaskFileError(MemoroError):
    """A task file cannot be trusted, read or written."""


class CompositionError(MemoroError):
    """These tasks cannot stand together on this backbone."""


class ImageError(MemoroError):
    """An image cannot be read safely."""


class DataError(MemoroError):
    """A set of images cannot be used as it is."""


class TrainingError(MemoroError):
    """A training cannot start, or cannot go on."""


class CacheError(MemoroError):
    """Features cannot be kept, or not within the budget."""

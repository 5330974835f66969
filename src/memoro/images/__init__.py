"""Finding and opening untrusted image files, and turning images into tensors."""

from memoro.images.finding import find_images, walk_images
from memoro.images.opening import MAX_PIXELS, PICTURE_TYPES, Draft, Levels, Picture, is_deep, open_image, read_file
from memoro.images.preprocessing import Preprocessing

__all__ = [
    "MAX_PIXELS",
    "PICTURE_TYPES",
    "Draft",
    "Levels",
    "Picture",
    "Preprocessing",
    "find_images",
    "is_deep",
    "open_image",
    "read_file",
    "walk_images",
]

"""Finding and opening untrusted image files, and turning images into tensors."""

from memoro.images.finding import find_images, walk_images
from memoro.images.opening import MAX_PIXELS, PICTURE_TYPES, Draft, Levels, Picture, is_deep, open_image, read_file
from memoro.images.preprocessing import Preprocessing
from memoro.images.synthetic import synthetic_image

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
    "synthetic_image",
    "walk_images",
]

"""Finding and opening untrusted image files, and turning images into tensors."""

from memoro.images.finding import find_images, walk_images
from memoro.images.opening import MAX_PIXELS, PICTURE_TYPES, Draft, Picture, open_image, read_file
from memoro.images.preprocessing import Preprocessing
from memoro.images.synthetic import synthetic_image

__all__ = [
    "MAX_PIXELS",
    "PICTURE_TYPES",
    "Draft",
    "Picture",
    "Preprocessing",
    "find_images",
    "open_image",
    "read_file",
    "synthetic_image",
    "walk_images",
]

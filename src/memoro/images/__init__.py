"""Finding and opening untrusted image files, and turning images into the bytes of pixels."""

from memoro.images.augment import Augment, output_size
from memoro.images.decoding import Decoded, Decoder, NamedPicture, View
from memoro.images.finding import find_images, walk_images
from memoro.images.opening import (
    MAX_PIXELS,
    PICTURE_TYPES,
    Draft,
    Levels,
    Picture,
    encode_image,
    is_deep,
    open_image,
    read_file,
)
from memoro.images.preprocessing import Preprocessing

__all__ = [
    "MAX_PIXELS",
    "PICTURE_TYPES",
    "Augment",
    "Decoded",
    "Decoder",
    "Draft",
    "Levels",
    "NamedPicture",
    "Picture",
    "Preprocessing",
    "View",
    "encode_image",
    "find_images",
    "is_deep",
    "open_image",
    "output_size",
    "read_file",
    "walk_images",
]

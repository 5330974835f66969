"""Opening untrusted image files, and turning images into tensors."""

from memoro.images.opening import IMAGE_SUFFIXES, MAX_PIXELS, Draft, open_image
from memoro.images.preprocessing import Preprocessing, shared_draft

__all__ = ["IMAGE_SUFFIXES", "MAX_PIXELS", "Draft", "Preprocessing", "open_image", "shared_draft"]

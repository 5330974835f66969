"""Finding and opening untrusted image files, and turning images into the bytes of pixels."""

from memoro.images.augment import Augment as Augment
from memoro.images.augment import View as View
from memoro.images.augment import output_size as output_size
from memoro.images.decoding import Decoded as Decoded
from memoro.images.decoding import Decoder as Decoder
from memoro.images.decoding import NamedPicture as NamedPicture
from memoro.images.finding import find_images as find_images
from memoro.images.finding import walk_images as walk_images
from memoro.images.opening import PICTURE_TYPES as PICTURE_TYPES
from memoro.images.opening import Draft as Draft
from memoro.images.opening import Levels as Levels
from memoro.images.opening import Picture as Picture
from memoro.images.opening import encode_image as encode_image
from memoro.images.opening import is_deep as is_deep
from memoro.images.opening import open_image as open_image
from memoro.images.opening import read_file as read_file
from memoro.images.preprocessing import Preprocessing as Preprocessing

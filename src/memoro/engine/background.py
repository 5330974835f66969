"""What familiarity is relative to: how the backbone sees images of nothing in particular."""

from __future__ import annotations

import torch
from torch import Tensor

from memoro.backbones import Backbone
from memoro.engine.streams import entering_token
from memoro.images import Preprocessing, synthetic_image

IMAGES, BATCH = 30, 10


def background_token(backbone: Backbone, preprocessing: Preprocessing) -> Tensor:
    """The mean (dim) of the base's token, as it enters the last layer, over a few synthetic images."""
    tokens, (height, width) = [], backbone.image_size
    for start in range(0, IMAGES, BATCH):
        images = [synthetic_image(number).resize((width, height)) for number in range(start, start + BATCH)]
        pixels = torch.stack([preprocessing.to_tensor(image) for image in images])
        with torch.no_grad():
            found = entering_token(backbone.anatomy, pixels.to(backbone.device, backbone.dtype))
        tokens.append(found.float().cpu())
    return torch.cat(tokens).mean(dim=0)

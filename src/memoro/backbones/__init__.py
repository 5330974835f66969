"""Frozen Vision Transformers behind one protocol."""

from memoro.backbones.anatomy import Anatomy, Block, Context
from memoro.backbones.backbone import Backbone, BackboneRecord, require_backbone
from memoro.backbones.fingerprint import Fingerprint
from memoro.backbones.load import load_backbone

__all__ = [
    "Anatomy",
    "Backbone",
    "BackboneRecord",
    "Block",
    "Context",
    "Fingerprint",
    "load_backbone",
    "require_backbone",
]

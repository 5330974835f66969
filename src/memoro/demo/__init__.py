"""`memoro demo`: training, composition and evaluation on generated images, without a download."""

from memoro.demo.demo import run_demo

__all__ = ["run_demo"]

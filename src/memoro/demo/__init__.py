"""`memoro demo`: the whole job on what is installed."""

from memoro.demo.story import run_demo

__all__ = ["run_demo"]

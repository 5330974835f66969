"""Benchmarks. They print ratios measured in one process: absolute times differ from machine to machine."""

"""The parts of scripts/distill.py, one noun a file."""

"""Tasks and their files."""

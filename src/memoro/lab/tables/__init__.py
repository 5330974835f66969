"""The tables of the reproduction: comparisons, claims, and how they are written."""

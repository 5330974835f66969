"""`memoro lab reproduce`: the paper's tables, at the size that a machine allows, and what they leave open."""

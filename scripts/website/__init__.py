"""What the documentation has besides the pages in docs/: the reference, the pictures, and the pages of other folders."""

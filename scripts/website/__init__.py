"""What the site has besides the pages in docs/: the reference, the drawings, and pages of other folders."""

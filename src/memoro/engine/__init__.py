"""The two streams: one plain pass of the backbone, one token for each task."""

"""The HTTP server: one backbone in memory; attach and detach tasks without a restart. It never imports training."""

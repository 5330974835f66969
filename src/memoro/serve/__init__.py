"""The HTTP server: one backbone in memory, tasks that come and go without a restart. It never imports training."""

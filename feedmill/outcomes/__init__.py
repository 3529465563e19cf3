"""Outcomes of posts: results and dead letters, read, retried and deleted."""

"""Forget posts: find every copy of what a person asks about, delete it, and log the deletion."""

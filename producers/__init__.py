"""Producers read posts from files and Reddit, and publish them by task name. They know nothing of classification."""

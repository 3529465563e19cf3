"""Producers read posts from files and Reddit, and publish them by task name. They do not depend on the workers."""

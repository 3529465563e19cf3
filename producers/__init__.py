"""Producers read posts from files, Reddit and live sources, and publish them by task name.

They do not know workers.
"""

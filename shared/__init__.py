"""Code that producers and workers share: messages, settings, broker, keys, results, errors.

Imports neither torch nor praw, and depends on neither producers nor workers.
"""

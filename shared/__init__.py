"""The vocabulary both sides share: messages, settings, broker, keys, results, errors.

Knows nothing of where posts come from or of how they are classified; imports neither torch nor praw.
"""

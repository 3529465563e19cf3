"""Feeds as a live source: RSS, Atom and JSON Feed.

Read in this order: `subscriptions.py` (the feeds file), `client.py` (requests and redirects),
`documents.py` and `parser.py` (documents, in a process of its own), `state.py` (what Redis keeps
of each feed, and when it is read again), `posts.py`, `source.py` (the source).
"""

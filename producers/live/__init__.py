"""A framework for daemons that follow a live source: cursor, each post once, purges, gaps, backoff, status, metrics.

Read in this order: `source.py` (what a source implements), `daemon.py` (the loop), `state.py` (state in Redis). A
source is one file: `producers/bluesky.py` and docs/examples/extending/hacker_news.py. The Reddit daemon reads listings
instead of events, and shares only the clock, the request budget and the metrics.
"""

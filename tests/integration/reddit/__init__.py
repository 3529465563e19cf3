"""producers/reddit on a real Redis, with real PRAW, against the loopback Reddit; only time is
simulated.
"""

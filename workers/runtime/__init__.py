"""Run a Celery worker whose pool is one device: consumer, pool, requests, tasks, metrics and model
swaps.
"""

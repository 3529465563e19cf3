"""Load models and run them: devices, weights, tokenizers, classifiers and engines.

Independent of Celery and Redis.
"""

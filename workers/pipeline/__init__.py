"""Turn messages into stored results on tokenizer, device and writer threads.

Independent of Celery.
"""

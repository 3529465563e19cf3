"""Train classifiers: all weights (`finetune.py`), or a head on frozen embeddings (`head.py`, `active.py`).

`examples.py` builds the datasets. No module here reads posts from files or depends on Celery or Redis.
"""

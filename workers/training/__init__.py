"""Fine-tuning of sequence classifiers with transformers' Trainer.

`examples.py` builds the datasets, `order.py` orders the batches, `model.py` creates the model, `run.py` trains it. None
of them reads posts from files or depends on Celery or Redis.
"""

"""A model of one's own: a sequence classifier, fine-tuned by transformers' Trainer.

`examples.py` says what is learnt and what is tested, `order.py` when; `model.py` makes the model that is trained on;
`run.py` trains it. None of them reads posts, or knows Celery or Redis.
"""

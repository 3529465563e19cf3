"""Train classifiers: all weights (`finetune.py`), or a head on frozen embeddings (`head.py`,
`active.py`).
"""

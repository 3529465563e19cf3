"""Train a classifier: collect examples, run the training, describe the model."""

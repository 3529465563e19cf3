"""How a padded micro-batch runs on a device. Knows nothing of labels or scores."""

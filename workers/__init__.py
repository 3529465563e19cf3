"""Workers: classify posts and train models. Independent of where posts come from."""

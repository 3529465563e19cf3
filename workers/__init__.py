"""Workers: classify posts. Independent of where posts come from."""

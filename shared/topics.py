"""The sixteen default topics: what posts are labelled with when a message names no labels.

Where labels are embedded, each has a description that stands for it in the template: a bare name says too little of
what people post under it. They were chosen on half of a set of real posts and measured on the other half; see
DECISIONS.md. Where a model reasons about entailment the names stand for themselves, as in transformers' pipeline.
"""

DESCRIBED_TOPICS: dict[str, tuple[str, ...]] = {
    "climate change": ("climate change and the environment",),
    "technology": ("technology, software and gadgets",),
    "sports": ("sports, teams and matches",),
    "finance": ("personal finance, investing and the stock market",),
    "health": ("health, medicine and fitness",),
    "education": ("education, schools, teachers and students",),
    "gaming": ("video games and gaming",),
    "politics": ("politics, government and elections",),
    "science": ("science and research",),
    "entertainment": ("movies, television shows and celebrities",),
    "music": ("music, songs and bands",),
    "food": ("food, cooking and recipes",),
    "travel": ("travel, trips and places to visit",),
    "relationships": ("relationships, dating and family",),
    "business": ("business, companies and entrepreneurship",),
    "books": ("books, reading and authors",),
}

TOPICS = tuple(DESCRIBED_TOPICS)

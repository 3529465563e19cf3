"""The sixteen default topics: what posts are labelled with when a message names no labels."""

DEFAULT_TOPICS: tuple[str, ...] = (
    "climate change",
    "technology",
    "sports",
    "finance",
    "health",
    "education",
    "gaming",
    "politics",
    "science",
    "entertainment",
    "music",
    "food",
    "travel",
    "relationships",
    "business",
    "books",
)

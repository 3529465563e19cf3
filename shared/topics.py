"""The sixteen default topics: labels for messages that name none.

Embedding models need several descriptions per label, because a label's name alone says too little about its posts. The
descriptions were chosen on one half of a set of real posts and measured on the other half; see DECISIONS.md. NLI models
use the names alone, like transformers' pipeline.
"""

DESCRIBED_TOPICS: dict[str, tuple[str, ...]] = {
    "climate change": (
        "climate change and the environment",
        "global warming and carbon emissions",
        "climate policy and climate science",
        "pollution, energy and nature conservation",
    ),
    "technology": (
        "technology, software and gadgets",
        "computers, phones and apps",
        "data science, machine learning and artificial intelligence",
    ),
    "sports": (
        "sports, teams and matches",
        "athletes and championships",
        "training for running and racing",
    ),
    "finance": (
        "personal finance, investing and the stock market",
        "cryptocurrency and bitcoin",
        "saving money and debt",
    ),
    "health": (
        "health, medicine and fitness",
        "whether a food is healthy",
        "an illness, its symptoms and its treatment",
    ),
    "education": (
        "education, schools, teachers and students",
        "university courses, professors and campus life",
        "learning a skill and how to study",
    ),
    "gaming": (
        "video games and gaming",
        "characters, levels and players in a video game",
        "game developers and game releases",
    ),
    "politics": (
        "politics, government and elections",
        "a president, a party or a vote",
        "political news and opinions",
    ),
    "science": (
        "science and research",
        "chemistry, physics and biology",
        "history and psychology research",
    ),
    "entertainment": (
        "movies, television shows and celebrities",
        "films, actors and directors",
        "superheroes and anime",
    ),
    "music": (
        "music, songs and bands",
        "playing the guitar or the piano",
        "music theory, chords and scales",
    ),
    "food": ("food, cooking and recipes",),
    "travel": (
        "travel, trips and places to visit",
        "tourism in a foreign country",
        "backpacking, hostels and itineraries",
    ),
    "relationships": (
        "relationships, dating and family",
        "parents, children and siblings",
        "a conflict with a friend or partner",
        "marriage, love and breaking up",
    ),
    "business": (
        "business, companies and entrepreneurship",
        "starting and running a small business",
    ),
    "books": (
        "books, reading and authors",
        "novels, stories and writing",
        "writing a novel and its characters",
    ),
}

TOPICS = tuple(DESCRIBED_TOPICS)

"""The texts that a model has learnt from, as digests: an evaluation leaves these posts out.

The digests quote no post, and a text cannot be computed from them.
"""

import os
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

from feedmill.shared.atomic_files import replacing
from feedmill.shared.errors import UserError, clause, printable
from feedmill.shared.messages import Post

#: Name of the digests' file in a model's folder: sorted 64-bit integers.
LEARNT_FILE = "learnt.npy"
#: Maximum number of digests that are read: 800 MB.
MAX_DIGESTS = 100_000_000


def digest_of(post: Post) -> int:
    """Return the digest of a post's text: 64 bits. Case and spaces do not count."""
    words = " ".join(post.text.casefold().split())
    hashed = blake2b(words.encode("utf-8", "replace"), digest_size=8)
    return int.from_bytes(hashed.digest(), "little")


def save(folder: Path, posts: Iterable[Post]) -> None:
    """Write the digests of the posts that a model has learnt from. Raises OSError."""
    # Of the extra `worker`: the commands are there without it, to say so.
    import numpy as np  # noqa: PLC0415

    digests = {digest_of(post) for post in posts}
    array = np.array(sorted(digests), dtype=np.uint64)
    with replacing(folder / LEARNT_FILE) as temporary, temporary.open("wb") as file:
        np.save(file, array, allow_pickle=False)


def digests_of(model: str) -> frozenset[int] | None:
    """Return the digests of the texts that a model has learnt from; None if they are not recorded.

    model: a folder, else a name, whose texts are never recorded. Raises UserError if the file
    cannot be read.
    """
    path = _folder(model) / LEARNT_FILE
    if not path.is_file():
        return None
    import numpy as np  # noqa: PLC0415 - as above

    try:
        array = np.load(
            path,
            mmap_mode="r",
            allow_pickle=False,
        )
    except (OSError, ValueError, EOFError) as error:
        raise _damaged_error(path, clause(error)) from None
    if array.ndim != 1 or array.dtype != np.uint64 or len(array) > MAX_DIGESTS:
        raise _damaged_error(path, "it does not hold digests of texts")
    return frozenset(array.tolist())


def was_trained(model: str) -> bool:
    """Return whether a model is the folder of a training, of any version."""
    return (_folder(model) / "training.json").is_file()


def _folder(model: str) -> Path:
    # Path.expanduser raises if there is no such user.
    return Path(os.path.expanduser(model))  # noqa: PTH111


def _damaged_error(path: Path, reason: str) -> UserError:
    return UserError(
        f"Cannot read {printable(str(path))}: {printable(reason)}. Train the model again, or "
        "delete the file: an evaluation then counts the posts that it has learnt from."
    )

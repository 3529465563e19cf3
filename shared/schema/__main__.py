"""`python -m shared.schema` writes request.json and result.json anew."""

from shared.schema import FOLDER, written

for name, text in written().items():
    (FOLDER / name).write_text(text)

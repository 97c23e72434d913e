"""Write the folder corpus/ to try the example on: the reference of the Python language, which Python carries.

Leave this file out and put your own UTF-8 files there.
"""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics

folder = Path("corpus")
folder.mkdir(exist_ok=True)
for name, text in topics.items():
    (folder / f"{name.replace('/', '-')}.txt").write_text(text, "utf-8")
print(f"{folder}: {len(topics)} files, {sum(map(len, topics.values())) / 1000:.0f} kB")

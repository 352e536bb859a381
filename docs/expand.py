"""Expands comments in pages: tables made from CSV files, and Markdown files of the repository.

<!-- table: NAME -->       the result of `tables.TABLES[NAME]`
<!-- include: PATH -->     a Markdown file of the repository, without its title
"""

import pathlib
import re

from . import tables

ROOT = pathlib.Path(__file__).parent.parent
PAGES = pathlib.Path(__file__).parent / "pages"


def expanded(page: str) -> str:
    page = re.sub(r"^<!-- include: (\S+) -->$", lambda match: _included(match[1]), page, flags=re.M)
    return re.sub(r"^<!-- table: (\w+) -->$", lambda match: tables.TABLES[match[1]](), page, flags=re.M)


def _included(path: str) -> str:
    """Return a file without its title. Links into the repository become paths, as the site lacks the files."""
    text = (ROOT / path).read_text().partition("\n")[2].strip()

    def name(match):
        target = (ROOT / path).parent.joinpath(match[2]).resolve().relative_to(ROOT)
        return f"{match[1]} (`{target}`)"

    return re.sub(r"\[([^\]]+)\]\((?!https?:)([^)#]+)\)", name, text)

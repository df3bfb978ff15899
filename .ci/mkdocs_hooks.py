"""What the site needs beside the pages as they are read in the repository."""

import re

OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(?!images/)[^)]*\)")
CROSS_REFERENCE = re.compile(r"\[(<code>)~?(?:\w+\.)*(\w+</code>)\]")


def on_page_markdown(markdown: str, page, **_) -> str:
    """Links to files outside of the pages (benchmarks, recipes) lead nowhere on the site: their text stays."""
    return markdown if page.file.src_uri.startswith("reference/") else OUTSIDE.sub(r"\1", markdown)


def on_page_content(html: str, **_) -> str:
    """Docstrings name classes as [`~trl.SFTTrainer`], in the manner of transformers: the name stays."""
    return CROSS_REFERENCE.sub(r"\1\2", html)

"""`dagpack show --html`: session files as one page that needs nothing else.

It goes from left to right, and each part knows only those before it:

    render    conversations to token trees
    plan      the tree into windows
    locate    whose tokens are where in the tree, with walk and messages
    sessions  entries and what they say, with parts, texts and marks
    blocks    the tree cut into what looks alike
    build     all of it to a `Page`
    write     a `Page` to HTML

`model` is what a page shows, as plain data; the terminal and `--json` show the same. `assets` holds style and scripts.
All text of sessions passes `Texts`, where it is redacted, made visible and cut.
"""

from dagpack_hf.view.page.build import Built, build_page
from dagpack_hf.view.page.model import Page
from dagpack_hf.view.page.texts import DEFAULT_LIMIT, Texts
from dagpack_hf.view.page.write import page_html, write_page

__all__ = ["DEFAULT_LIMIT", "Built", "Page", "Texts", "build_page", "page_html", "write_page"]

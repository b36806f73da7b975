"""Shows the examples of docstrings as code on the page of the API."""

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\n|$).*)*", re.MULTILINE)
"""From the first prompt to the next empty line."""


class Examples(griffe.Extension):
    """Puts a fence around each example."""

    def on_object(self, *, obj: Any, **others: Any) -> None:
        """Rewrites the text of one docstring."""
        if obj.docstring is not None:
            text = EXAMPLE.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)
